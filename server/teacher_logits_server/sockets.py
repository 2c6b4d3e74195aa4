"""Socket files, each held by one live server: claimed by a lock, replaced when its owner is dead.

    teacher.sock         the socket
    teacher.sock.lock    locked (flock) for as long as its server lives; holds that server's pid

The kernel frees the lock with its holder, however that ends. So a lock that is taken means
a live server, which is refused by its pid, and a free one means that the socket beside it
is left over. Who looks which it is, to claim a path or to clear one away, keeps others from looking
meanwhile by a lock of another kind (OFD), so that it is never taken for a live server itself.

Folders are made for this user alone (0700) where they do not exist, or for a group
too, which may pass through (2710). A folder that is there is left as it is: one that keeps the
group out is refused.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass

from teacher_logits.errors import ConfigError

LOCK_SUFFIX = ".lock"
FOLDER_MODE, GROUP_FOLDER_MODE = 0o700, 0o2710
OWNER_ONLY, GROUP_ONLY, EVERYONE = 0o600, 0o660, 0o666
GROUP_FLAG = "--socket-group"
_NO_GID, _GID_CHARS = (1 << 32) - 1, 10
"""To the kernel it is none; and the digits of those below it."""
_NOBODY_FOLLOWS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, kw_only=True)
class Audience:
    """Who may connect to a socket: its mode, and the id of its group where it has one."""

    mode: int = OWNER_ONLY
    group: int | None = None


def audience_of(socket_group: str, *, for_everyone: bool) -> Audience:
    """Return who is to connect: a group, or all who reach the folder, or this user alone.

    Raises:
        ConfigError: there is no such group.
    """
    if not socket_group:
        return Audience(mode=EVERYONE if for_everyone else OWNER_ONLY)
    try:
        known = socket_group.isdecimal()  # a number needs no entry in this system's list
        group = _number(socket_group) if known else grp.getgrnam(socket_group).gr_gid
    except KeyError:
        raise _group_refused(socket_group, "there is no such group here; give its number") from None
    return Audience(mode=GROUP_ONLY, group=group)


def _number(socket_group: str) -> int:
    digits = socket_group.lstrip("0") or "0"
    if len(digits) > _GID_CHARS or int(digits) >= _NO_GID:
        raise _group_refused(socket_group[:80], f"group ids are below {_NO_GID}")
    return int(digits)


class SocketClaim:
    """The right of this server, and no other, to a socket's path, until it is released."""

    def __init__(self, path: str, *, flag: str, audience: Audience | None = None) -> None:
        """Claim ``path`` and clear away what a dead server left there.

        Raises:
            ConfigError: a live server has it, its folder is not ours or cannot be made, or
                something lies there that is no socket or cannot be removed. The message names
                ``flag``.
        """
        self.path = path
        self._flag = flag
        self._audience = audience or Audience()
        self._pid = os.getpid()
        self._fd = -1
        _make_folder(os.path.dirname(path), flag=flag, group=self._audience.group)
        self._fd = self._lock()
        try:
            self._clear()
        except BaseException:
            self._unlock()
            raise

    def let_in(self) -> None:
        """Let the audience connect to the socket, which is there by now, and nobody else.

        Raises:
            ConfigError: this user may not give the socket to the group.
        """
        _give(self.path, self._audience.group)
        os.chmod(self.path, self._audience.mode)

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
                _look_alone(fd, fcntl.F_WRLCK)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, path):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                    _look_alone(fd, fcntl.F_UNLCK)
                    return fd
            except BlockingIOError:
                raise self._taken(fd) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its owner removed the file between our two looks: once more

    def _open(self, path: str) -> int:
        try:
            return os.open(path, _NOBODY_FOLLOWS | os.O_CREAT, OWNER_ONLY)
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


def clear_if_dead(path: str) -> bool:
    """Remove a socket of this user's and its lock where its server is gone; say whether it was so.

    A server that is alive, or claims the path at this moment, is left alone. What cannot be
    looked at stays.
    """
    lock = path + LOCK_SUFFIX
    try:
        fd = os.open(lock, _NOBODY_FOLLOWS | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        _look_alone(fd, fcntl.F_WRLCK)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (_is_at(fd, lock) and _is_own_lock(fd) and _is_own_dead(path)):
            return False
        _remove(path)
        _remove(lock)
        return True
    except OSError:  # a lock that is taken as well
        return False
    finally:
        os.close(fd)


def _look_alone(fd: int, kind: int) -> None:
    """Keep others who claim or clear away a path waiting, or (``F_UNLCK``) do so no more."""
    whole_file = struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0)
    with suppress(OSError):  # a file system without them has servers refused rather than waiting
        fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, whole_file)


def _is_own_lock(fd: int) -> bool:
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _is_own_dead(path: str) -> bool:
    """Whether a socket is this user's with nobody behind it, or is not there at all."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return True
    is_own = stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
    return is_own and not _answers(path)


def _elsewhere() -> str:
    return f"listen in a folder that user {os.geteuid()} may write in"


def _make_folder(folder: str, *, flag: str, group: int | None) -> None:
    try:
        is_new = not os.path.isdir(folder)
        os.makedirs(folder, mode=FOLDER_MODE, exist_ok=True)
        if is_new and group is not None:
            _give(folder, group)
            os.chmod(folder, GROUP_FOLDER_MODE)  # behind it: it takes the set-group bit away
        found = os.stat(folder)
        owner = found.st_uid
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
    if group is not None and not _lets_in(found, group):
        raise _group_refused(
            group,
            f"the folder {folder} (mode {stat.S_IMODE(found.st_mode):04o}, group {found.st_gid}) "
            f"keeps it out: chgrp {group} {folder} && chmod g+x {folder}, or listen in a folder "
            "that is not there yet",
        )


def _lets_in(folder: os.stat_result, group: int) -> bool:
    """Whether members of a group may pass through a folder."""
    bit = stat.S_IXGRP if folder.st_gid == group else stat.S_IXOTH
    return bool(folder.st_mode & bit)


def _give(path: str, group: int | None) -> None:
    if group is None:
        return
    try:
        os.chown(path, -1, group)
    except PermissionError:
        why = f"user {os.geteuid()} is not in it, and cannot give {path} to it"
        raise _group_refused(group, why) from None


def _group_refused(group: str | int, why: str) -> ConfigError:
    return ConfigError(f"{GROUP_FLAG} {group}: {why}", facts={"flag": GROUP_FLAG, "value": group})


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
