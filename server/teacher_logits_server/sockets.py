"""Socket files, each held by one live server: claimed by a lock, replaced when its owner is dead.

    teacher.sock         the socket
    teacher.sock.lock    locked (flock) for as long as its server lives; holds that server's pid

The kernel frees the lock with its holder, however that ends. So a lock that is taken means
a live server, which is refused by its pid, and a free one means that the socket beside it
is left over. Folders are made for this user alone (0700) where they do not exist.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat

from teacher_logits.errors import ConfigError

LOCK_SUFFIX = ".lock"
FOLDER_MODE = 0o700
OWNER_ONLY, EVERYONE = 0o600, 0o666


class SocketClaim:
    """The right of this server, and no other, to a socket's path, until it is released."""

    def __init__(self, path: str, *, flag: str) -> None:
        """Claim ``path`` and clear away what a dead server left there.

        Raises:
            ConfigError: a live server has it, its folder is not ours or cannot be made, or
                something lies there that is no socket or cannot be removed. The message names
                ``flag``.
        """
        self.path = path
        self._flag = flag
        self._pid = os.getpid()
        self._fd = -1
        _make_folder(os.path.dirname(path), flag=flag)
        self._fd = self._lock()
        try:
            self._clear()
        except BaseException:
            self._unlock()
            raise

    def set_mode(self, mode: int) -> None:
        """Let only this user connect, or everyone who reaches the folder."""
        os.chmod(self.path, mode)

    def release(self) -> None:
        """Remove the socket and give the claim back. Doing so twice is fine."""
        if self._fd < 0 or self._pid != os.getpid():
            return
        _remove(self.path)
        self._unlock()

    def _unlock(self) -> None:
        # In this order: until the lock is let go, nobody else has put one of theirs there.
        _remove(self.path + LOCK_SUFFIX)
        os.close(self._fd)
        self._fd = -1

    def _lock(self) -> int:
        path = self.path + LOCK_SUFFIX
        while True:
            fd = self._open(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, path):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                    return fd
            except BlockingIOError:
                raise self._taken(fd) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its owner removed the file between our two looks: once more

    def _open(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags, OWNER_ONLY)
        except OSError as error:
            why = f"cannot open its lock {path}: {error.strerror}; {_elsewhere()}"
            raise self._refused(why) from error

    def _taken(self, fd: int) -> ConfigError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        error = self._refused(
            f"the server with pid {holder} has this socket: stop it, or give this one another "
            f"{self._flag}"
        )
        error.facts["pid"] = int(holder) if holder.isdecimal() else holder
        return error

    def _clear(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise self._refused("something that is no socket is there; move it away")
        if _answers(self.path):
            raise self._refused("a program that is no server of ours listens there")
        try:
            os.unlink(self.path)
        except OSError as error:
            raise self._refused(f"cannot remove what is left there: {error.strerror}") from error

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._flag} {self.path}: {why}", facts={"flag": self._flag, "path": self.path}
        )


def _elsewhere() -> str:
    return f"listen in a folder that user {os.geteuid()} may write in"


def _make_folder(folder: str, *, flag: str) -> None:
    try:
        os.makedirs(folder, mode=FOLDER_MODE, exist_ok=True)
        owner = os.stat(folder).st_uid
    except OSError as error:
        raise ConfigError(
            f"{flag}: the folder {folder} of the socket cannot be made: {error.strerror}; "
            f"{_elsewhere()}",
            facts={"flag": flag, "folder": folder},
        ) from error
    if owner not in {0, os.geteuid()}:
        raise ConfigError(
            f"{flag}: the folder {folder} belongs to user {owner}, who could put another socket "
            f"in the place of ours: choose a folder of root's or of user {os.geteuid()}",
            facts={"flag": flag, "folder": folder, "owner": owner},
        )


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _is_at(fd: int, path: str) -> bool:
    """Whether the open file is still the one that the path names."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def _answers(path: str) -> bool:
    """Whether a live process listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # EPROTOTYPE: a listener of another kind; EAGAIN: a listener with a full backlog.
        return probe.connect_ex(path) not in {errno.ECONNREFUSED, errno.ENOENT}
