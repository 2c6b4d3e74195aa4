"""What servers left that are gone is cleared away; who lives, or is just coming, is left alone."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.held import left_behind, open_descriptors
from tests.server.test_sockets import OWNER

from teacher_logits.addresses import Address
from teacher_logits_server import sockets
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.listening import claim_broker, clear_dead_brokers
from teacher_logits_server.sockets import Audience, SocketClaim

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 60.0
SHUT_OUT = "users of --allow-uid cannot reach the socket"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may enter, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


def killed_owner_of(path: Path) -> None:
    """Have a process claim a path, listen there and die."""
    command = [sys.executable, "-c", OWNER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.read(9) == b"listening"
        owner.kill()


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_the_sockets_by_port_of_the_dead_go_and_nothing_else(folder: Path) -> None:
    killed_owner_of(folder / "port-1.broker")
    killed_owner_of(folder / "teacher.sock.broker")
    (folder / "port-2.broker.lock").write_text("4711\n")
    (folder / "port-3.broker").write_text("no socket")
    (folder / "port-3.broker.lock").write_text("4711\n")
    (folder / "port-4.broker.lock").symlink_to(folder / "port-3.broker")
    live = SocketClaim(str(folder / "port-5.broker"), flag="--broker")
    kept = ["port-3.broker", "port-3.broker.lock", "port-4.broker.lock"]
    before = open_descriptors()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(live.path)
        listener.listen()
        clear_dead_brokers(str(folder))

        assert names_in(folder) == [
            *kept,
            "port-5.broker",
            "port-5.broker.lock",
            "teacher.sock.broker",
            "teacher.sock.broker.lock",
        ]
    assert not left_behind(before, open_descriptors)
    live.release()


def test_a_server_that_starts_clears_the_folder_that_it_uses(folder: Path) -> None:
    killed_owner_of(folder / "port-1.broker")
    config = ServerConfig(broker=str(folder / "port-2.broker"))

    claim = claim_broker(config, [Address(host="127.0.0.1", port=2)], Audience())

    assert names_in(folder) == ["port-2.broker.lock"]
    claim.release()


def test_who_comes_while_it_is_cleared_waits_and_is_not_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "port-1.broker"
    killed_owner_of(path)
    comes, claims = threading.Event(), list[SocketClaim]()
    real = sockets._look_alone

    def look(fd: int, kind: int) -> None:
        if threading.current_thread() is claimant:
            comes.set()
        real(fd, kind)

    monkeypatch.setattr(sockets, "_look_alone", look)
    claimant = threading.Thread(
        target=lambda: claims.append(SocketClaim(str(path), flag="--broker"))
    )
    real_check = sockets._is_own_dead

    def check(dead: str) -> bool:
        claimant.start()
        assert comes.wait(SECONDS)
        return real_check(dead)

    monkeypatch.setattr(sockets, "_is_own_dead", check)
    assert sockets.clear_if_dead(str(path))
    claimant.join(SECONDS)

    (claim,) = claims
    with open(path.with_suffix(".broker.lock"), "rb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    claim.release()
    assert names_in(folder) == []


@pytest.mark.parametrize(
    ("mode", "uids", "warned"),
    [
        (0o700, (4711,), True),
        (0o711, (4711,), False),
        (0o710, (4711,), False),
        (0o700, (0, os.geteuid()), False),
        (0o700, (), False),
    ],
)
def test_a_user_that_may_map_memory_and_cannot_come_is_warned_of(
    *,
    folder: Path,
    mode: int,
    uids: tuple[int, ...],
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = folder / "sockets"
    inner.mkdir()
    inner.chmod(mode)
    config = ServerConfig(allow_uids=uids)

    claim_broker(config, [Address(path=str(inner / "s"))], Audience()).release()

    said = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert [each.getMessage() for each in said] == [SHUT_OUT] * warned
    for each in said:
        facts = vars(each)["facts"]
        assert (facts["folder"], facts["mode"]) == (str(inner), "0700")
        assert "--socket-group" in facts["cure"]


def test_a_group_that_may_connect_is_not_warned_of(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(allow_uids=(4711,))
    audience = Audience(mode=0o660, group=os.getegid())
    address = Address(path=str(folder / "made" / "s"))
    claim_broker(config, [address], audience).release()
    assert caplog.records == []
