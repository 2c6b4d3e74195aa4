"""Peers: which process is at the other end of a socket, on old kernels and new ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.held import left_behind, open_descriptors
from tests.stopping import stop

from teacher_logits_server.broker import peers
from teacher_logits_server.broker.peers import Peer, is_stopped, peer_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLIENT = """
import os, socket, sys
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(sys.argv[1])
os.read(0, 1)
"""


@pytest.fixture(params=["SO_PEERPIDFD", "pidfd_open"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the kernel names a peer: as it is, and as before Linux 6.5."""
    if request.param == "pidfd_open":
        monkeypatch.setattr(peers, "SO_PEERPIDFD", 9999)
    return str(request.param)


@contextmanager
def connected(path: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process that connected, and our end of the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(path)], stdin=subprocess.PIPE
        ) as process:
            connection, _ = listener.accept()
            with connection:
                yield process, connection
            process.kill()


@pytest.mark.usefixtures("kernel")
def test_a_peer_is_known_by_pid_and_user_until_it_ends(tmp_path: Path) -> None:
    with connected(tmp_path / "s") as (process, connection):
        peer = peer_of(connection)
        alive = peer.is_alive()
        process.kill()
        process.wait()

        assert (peer.pid, peer.uid) == (process.pid, os.geteuid())
        assert peer.is_proven
        assert (alive, peer.is_alive()) == (True, False)
        peer.close()


@pytest.mark.usefixtures("kernel")
def test_a_peer_that_ended_before_it_was_looked_at_is_not_taken_for_a_living_one(
    tmp_path: Path,
) -> None:
    with connected(tmp_path / "s") as (process, connection):
        process.kill()
        process.wait()

        peer = peer_of(connection)
        assert not peer.is_proven or not peer.is_alive()
        peer.close()


def test_a_pid_that_another_user_s_process_has_by_now_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SO_PEERPIDFD", 9999)
    real = os.stat
    monkeypatch.setattr(
        os, "stat", lambda path: real("/proc/self") if str(path) == "/" else _another(real(path))
    )
    with connected(tmp_path / "s") as (_, connection):
        before = open_descriptors()

        assert not peer_of(connection).is_proven
        assert not left_behind(before, open_descriptors)


def _another(there: os.stat_result) -> os.stat_result:
    return os.stat_result([*there[:4], there.st_uid + 1, *there[5:10]])


def test_a_pid_outside_our_namespace_proves_nothing_by_number() -> None:
    assert peers._open_pid(0, os.geteuid()) == -1


def test_a_kernel_that_tells_nothing_leaves_the_peer_unproven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(peers, "SO_PEERPIDFD", 9999)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with connected(tmp_path / "s") as (process, connection):
        peer = peer_of(connection)

        assert (peer.pid, peer.is_proven, peer.is_alive()) == (process.pid, False, True)
        peer.close()


def test_a_living_process_is_not_exiting_and_an_ended_one_tells_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    gone = Peer(pid=process.pid, uid=os.geteuid(), pidfd=-1)

    assert Peer(pid=os.getpid(), uid=os.geteuid(), pidfd=-1).is_exiting() is False
    assert gone.is_exiting() is None


def test_a_process_that_nobody_has_waited_for_is_exiting() -> None:
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert Peer(pid=process.pid, uid=os.geteuid(), pidfd=-1).is_exiting() is True


@pytest.mark.usefixtures("kernel")
def test_a_peer_that_is_stopped_is_seen_by_its_number_and_beginning(tmp_path: Path) -> None:
    with connected(tmp_path / "s") as (process, connection):
        peer = peer_of(connection)
        started = peer.started()
        running = is_stopped(peer.pid, started)
        stop(process.pid)

        assert started > 0
        assert not running
        assert is_stopped(peer.pid, started)
        assert not is_stopped(peer.pid, started + 1)  # another process, of the same number
        assert not is_stopped(peer.pid, 0)
        peer.close()


def test_one_that_is_gone_or_out_of_sight_is_not_stopped() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    assert not is_stopped(gone.pid, 1)
    assert not is_stopped(0, 1)
    assert Peer(pid=0, uid=0, pidfd=-1).started() == 0
    assert Peer(pid=os.getpid(), uid=0, pidfd=-1).started() == 0
