"""Socket files: one live server each, whatever the dead left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.held import left_behind, open_descriptors

from teacher_logits.errors import ConfigError
from teacher_logits_server import sockets
from teacher_logits_server.sockets import EVERYONE, OWNER_ONLY, Audience, SocketClaim, audience_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Claims a path, listens there, says so, and waits to be killed.
OWNER = """
import os, socket, sys
from teacher_logits_server.sockets import SocketClaim
claim = SocketClaim(sys.argv[1], flag="--listen")
listener = socket.socket(socket.AF_UNIX)
listener.bind(claim.path)
listener.listen()
os.write(1, b"listening")
os.read(0, 1)
"""


@contextmanager
def owner_process(path: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.read(9) == b"listening"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def bound(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        yield listener


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "teacher.sock")


def test_a_live_server_s_socket_is_refused_with_its_pid(path: str) -> None:
    with owner_process(path) as owner:
        with pytest.raises(ConfigError, match=f"--listen .*pid {owner.pid} ") as refusal:
            SocketClaim(path, flag="--listen")

        assert refusal.value.facts["pid"] == owner.pid
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)  # nothing happened to it


def test_a_killed_server_s_socket_is_replaced(path: str) -> None:
    with owner_process(path) as owner:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert os.path.exists(path)

    claim = SocketClaim(path, flag="--listen")
    with bound(path):
        claim.release()


def test_a_claim_counts_within_one_process_too(path: str) -> None:
    claim = SocketClaim(path, flag="--listen")
    with pytest.raises(ConfigError, match=f"pid {os.getpid()} "):
        SocketClaim(path, flag="--listen")

    claim.release()
    SocketClaim(path, flag="--listen").release()


def test_releasing_leaves_an_empty_folder_and_no_descriptor(path: str, tmp_path: Path) -> None:
    before = open_descriptors()
    claim = SocketClaim(path, flag="--listen")
    with bound(path):
        claim.release()
        claim.release()

    assert list(tmp_path.iterdir()) == []
    assert not left_behind(before, open_descriptors)


def test_a_refusal_leaves_no_descriptor(path: str) -> None:
    claim = SocketClaim(path, flag="--listen")
    before = open_descriptors()
    with pytest.raises(ConfigError):
        SocketClaim(path, flag="--listen")

    assert not left_behind(before, open_descriptors)
    claim.release()


def test_a_lock_that_was_removed_between_opening_and_locking_is_not_taken_for_the_lock(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, looks = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        looks.append(fd)
        if len(looks) == 1:  # the last owner goes in this very moment
            os.unlink(path + sockets.LOCK_SUFFIX)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    claim = SocketClaim(path, flag="--listen")

    assert len(looks) == 2
    assert os.path.exists(path + sockets.LOCK_SUFFIX)
    claim.release()


def test_a_forked_child_s_release_releases_nothing(path: str) -> None:
    claim = SocketClaim(path, flag="--listen")
    claim._pid = os.getpid() + 1  # as a child that inherited it sees itself
    claim.release()
    assert os.path.exists(path + sockets.LOCK_SUFFIX)

    claim._pid = os.getpid()
    claim.release()


def test_a_foreign_program_that_listens_there_is_left_alone(path: str) -> None:
    with bound(path) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match="no server of ours"):
            SocketClaim(path, flag="--listen")

        assert os.path.exists(path)


def test_a_foreign_file_is_left_alone(path: str, tmp_path: Path) -> None:
    (tmp_path / "teacher.sock").write_text("precious", encoding="utf-8")

    with pytest.raises(ConfigError, match="no socket"):
        SocketClaim(path, flag="--broker")
    assert (tmp_path / "teacher.sock").read_text("utf-8") == "precious"


def test_a_folder_that_is_not_there_is_made_for_its_user_alone(tmp_path: Path) -> None:
    claim = SocketClaim(str(tmp_path / "a" / "b" / "t.sock"), flag="--listen")

    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    claim.release()


def test_a_folder_that_cannot_be_made_is_refused_by_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"--listen.*cannot be made.*; listen in a folder"):
        SocketClaim(str(tmp_path / "file" / "t.sock"), flag="--listen")


def test_a_folder_of_another_user_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(os.path.dirname(path), 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)

    with pytest.raises(ConfigError, match="belongs to user"):
        SocketClaim(path, flag="--listen")


@pytest.mark.parametrize("mode", [OWNER_ONLY, EVERYONE])
def test_who_may_connect_is_said_once_the_socket_is_there(path: str, mode: int) -> None:
    claim = SocketClaim(path, flag="--listen", audience=Audience(mode=mode))
    with bound(path):
        claim.let_in()

        assert stat.S_IMODE(os.stat(path).st_mode) == mode
        claim.release()


class TestAGroup:
    """Of the process's own where it is not root, since nobody may give files away to another."""

    GROUP = 4711 if os.geteuid() == 0 else os.getegid()

    def test_passes_through_a_folder_that_is_made_for_it_and_connects(self, tmp_path: Path) -> None:
        path = str(tmp_path / "run" / "t.sock")
        audience = audience_of(str(self.GROUP), for_everyone=False)
        claim = SocketClaim(path, flag="--listen", audience=audience)
        with bound(path):
            claim.let_in()
            folder, it = os.stat(os.path.dirname(path)), os.stat(path)
            claim.release()

        assert (stat.S_IMODE(folder.st_mode), folder.st_gid) == (0o2710, self.GROUP)
        assert (stat.S_IMODE(it.st_mode), it.st_gid) == (0o660, self.GROUP)

    def test_is_alone_though_a_user_was_allowed_to_map_memory(self) -> None:
        audience = audience_of(str(self.GROUP), for_everyone=True)

        assert audience == Audience(mode=0o660, group=self.GROUP)

    def test_is_refused_where_a_folder_that_is_there_keeps_it_out(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        folder.mkdir(mode=0o700)
        audience = Audience(mode=0o660, group=self.GROUP)

        with pytest.raises(ConfigError, match=r"--socket-group.*keeps it out: chgrp"):
            SocketClaim(str(folder / "t.sock"), flag="--listen", audience=audience)

        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    def test_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="--socket-group no-such-group: there is no such"):
            audience_of("no-such-group", for_everyone=False)
        for number in (str((1 << 32) - 1), "9" * 5000):
            with pytest.raises(ConfigError, match=r"--socket-group [0-9]+: group ids are below"):
                audience_of(number, for_everyone=False)
