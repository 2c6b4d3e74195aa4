"""Half-open connections: a peer vanishes, and no end of it ever arrives."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.processes.running import line_of
from tests.processes.two_nets import CLIENT, SERVER, Cable, cable, why_not

from teacher_logits.addresses import read_address
from teacher_logits_client.calls.inspection import inspect_server

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from teacher_logits.views import ServerView

PATIENCE_SECONDS = 300.0
"""Keepalive takes most of a minute."""
STUDENT = Path(__file__).with_name("half_open_student.py")
TIMES = ("--session-ttl", "2s", "--renew-interval", "500ms")


@dataclass(frozen=True)
class Place:
    """A server at one end of a cable, which its operator reaches past that."""

    cable: Cable
    address: str
    unix: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @contextmanager
    def student(self) -> Iterator[subprocess.Popen[str]]:
        """A student at the other end, which holds a lease."""
        command = [sys.executable, str(STUDENT), self.address]
        with self.cable.run(CLIENT, command) as process:
            assert "lease_id" in json.loads(line_of(process))
            yield process

    def view(self) -> ServerView:
        address = read_address(self.unix, what="address")
        return inspect_server(address, timeout=PATIENCE_SECONDS)

    def connections(self) -> int:
        return self.cable.connections(SERVER, self.port)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The server, on a Unix socket and at its end of the cable."""
    if why := why_not():
        pytest.skip(f"no namespaces here: {why}")
    unix = f"unix:{tmp_path_factory.mktemp('half') / 's'}"
    reading, writing = os.pipe()
    listen = ("--listen", unix, "--listen", f"{SERVER}:0", "--insecure")
    engine = ("--engine", "teacher_logits_client.testing:toy_teacher", "--pool-size", "4MiB")
    command = [sys.executable, "-m", "teacher_logits", "serve", *listen, *engine, *TIMES]
    with cable() as made, os.fdopen(reading) as ready:
        with made.run(SERVER, [*command, "--ready-fd", str(writing)], pass_fds=[writing]):
            os.close(writing)
            yield Place(made, json.loads(ready.readline())["addresses"][1], unix)


@pytest.fixture
def plugged(place: Place) -> Iterator[Place]:
    """The same, with the cable back in its place in the end."""
    yield place
    for end in (SERVER, CLIENT):
        place.cable.plug(end)
    await_true(lambda: not place.view().sessions)


def await_true(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < until


def told(process: subprocess.Popen[str], word: str) -> dict[str, object]:
    """Tell a student something, and return what it says to it."""
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    said: dict[str, object] = json.loads(line_of(process))
    return said


@pytest.mark.slow
def test_a_client_that_vanishes_keeps_nothing_beyond_its_ttl_and_no_connection_for_long(
    plugged: Place,
) -> None:
    with plugged.student():
        there = plugged.connections()
        assert plugged.view().leases
        plugged.cable.pull(CLIENT)
        await_true(lambda: not plugged.view().sessions)
        held = plugged.view()
        assert (held.leases, held.pool.used_bytes) == ((), 0)
        assert plugged.connections() == there > 0  # half open: nothing was heard of their end
        await_true(lambda: plugged.connections() == 0)


@pytest.mark.slow
def test_a_client_whose_server_vanishes_is_told_within_its_deadline_and_comes_back(
    plugged: Place,
) -> None:
    with plugged.student() as student:
        assert told(student, "score") == {"rows": 2}
        plugged.cable.pull(SERVER)
        assert told(student, "score")["error"] in ("DeadlinePassedError", "ServerUnreachableError")
        assert told(student, "use")["error"] == "SessionExpiredError"
        plugged.cable.plug(SERVER)
        assert told(student, "anew") == {"rows": 2}
