"""An operator takes room back by force, under readers in processes of their own.

Whatever becomes of the room, the reader finds out before it steps.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests import forked
from tests.client.publishing.a_publisher import a_grid, a_teacher
from tests.processes.running import PATIENCE_SECONDS, line_of
from tests.processes.test_fifty_steps import await_true
from tests.stopping import stop

import teacher_logits_client as tl
from teacher_logits.errors import (
    LeaseLostError,
    NotAllowedError,
    SessionExpiredError,
    UnknownTeacherError,
)
from teacher_logits_client import cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Command = Callable[..., str]

ROOT = Path(__file__).parents[2]
names = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[tl.testing.ServerProcess]:
    with tl.testing.serve(pool_size="8MiB") as server:
        yield server


@pytest.fixture
def inspect(server: tl.testing.ServerProcess, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, as an operator types it; returns what it writes."""

    def run(*argv: str) -> str:
        capsys.readouterr()
        assert cli.inspect([server.address, *argv]) == 0
        return capsys.readouterr().out

    return run


@contextmanager
def reading(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A reader in a process of its own; it is killed in the end."""
    process: subprocess.Popen[str] = forked.Popen(
        [sys.executable, "-m", "tests.processes.reader", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def published(address: str) -> Iterator[tuple[str, tl.Publisher]]:
    """A teacher of its own with step 0, in a pool that holds two steps."""
    teacher_id = f"reclaimed-{next(names)}"
    profile = a_teacher(teacher_id, batch_grid=a_grid(rows=2), top_k=4)
    with (
        tl.connect(address) as client,
        client.open_publisher(profile, pool_size_bytes=8192, slab_size_bytes=8192) as publisher,
    ):
        write(publisher, 0)
        yield teacher_id, publisher


def write(publisher: tl.Publisher, step: int) -> None:
    """Publish a step of two short rows."""
    logits = torch.full((5, 56), float(step))
    with publisher.reserve(step, input_ids=[[1, 2, 3], [4, 5]], timeout=PATIENCE_SECONDS) as draft:
        tl.select_top_k(logits, out=draft)


def go_on(process: subprocess.Popen[str]) -> None:
    """Have a reader close its lease."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def the_session(inspect: Command, process: subprocess.Popen[str]) -> dict[str, object]:
    """A reader's session, as an operator sees it."""
    sessions = json.loads(inspect("--json"))["sessions"]
    (found,) = [each for each in sessions if each["pid"] == process.pid]
    return dict(found)


def the_lease(inspect: Command, process: subprocess.Popen[str]) -> str:
    """The one lease that a reader holds, once the ones before have come back."""
    session_id = the_session(inspect, process)["session_id"]
    found: list[str] = []

    def is_alone() -> bool:
        leases = json.loads(inspect("--json"))["leases"]
        found[:] = [str(each["lease_id"]) for each in leases if each["session_id"] == session_id]
        return len(found) == 1

    await_true(is_alone)
    return found[0]


def test_a_reader_whose_scored_payload_was_reclaimed_finds_it_stale(
    server: tl.testing.ServerProcess, inspect: Command
) -> None:
    with reading("scored", server.address) as reader:
        assert line_of(reader) == "held"
        go_on(reader)
        assert line_of(reader) == "fresh"
        assert line_of(reader) == "held"

        inspect("--reclaim", the_lease(inspect, reader), "--yes")
        go_on(reader)

        assert line_of(reader) == "stale"
        assert line_of(reader) == "held"


def test_a_reader_of_a_step_that_still_holds_its_room_is_told_too(
    server: tl.testing.ServerProcess, inspect: Command
) -> None:
    with (
        published(server.address) as (teacher_id, _),
        reading("step", server.address, teacher_id) as reader,
    ):
        assert line_of(reader) == "held"

        said = inspect("--reclaim", the_lease(inspect, reader), "--yes")
        go_on(reader)

        assert "0 B came free (the rest is held" in said
        assert line_of(reader) == "stale"
        assert line_of(reader) == "held"  # the step waits for it, and is had again
        go_on(reader)
        assert line_of(reader) == "fresh"


def test_a_reader_never_steps_on_room_that_was_written_anew(
    server: tl.testing.ServerProcess, inspect: Command
) -> None:
    with (
        published(server.address) as (teacher_id, publisher),
        reading("step", server.address, teacher_id) as reader,
        tl.connect(server.address) as client,
    ):
        assert line_of(reader) == "held"
        profile = tl.StudentProfile(batch_grid=a_grid(rows=2), top_k=4, teacher_id=teacher_id)
        with client.open_session(profile, prefetch=0) as other:  # later: it begins with step 1
            inspect("--reclaim", str(the_session(inspect, reader)["session_id"]), "--yes")
            write(publisher, 1)
            with other.acquire(step=1, timeout=PATIENCE_SECONDS):
                write(publisher, 2)  # the pool holds two: this one lies where the reader reads
        go_on(reader)

        assert line_of(reader) == "stale"
        assert line_of(reader) == "SessionExpiredError"


def test_a_stopped_student_is_shown_with_what_it_keeps(
    server: tl.testing.ServerProcess, inspect: Command
) -> None:
    with reading("scored", server.address) as reader:
        assert line_of(reader) == "held"
        assert the_session(inspect, reader)["state"] == "alive"

        stop(reader.pid)
        session, text = the_session(inspect, reader), inspect()
        reader.send_signal(signal.SIGCONT)

        assert session["state"] == "unresponsive"
        assert session["lease_count"] == 1
        assert session["leased_bytes"] == 4096
        assert f"kill -CONT {reader.pid}" in text
        go_on(reader)
        assert line_of(reader) == "fresh"
        assert line_of(reader) == "held"
        assert the_session(inspect, reader)["state"] == "alive"


def test_nothing_is_done_without_the_word(
    server: tl.testing.ServerProcess, inspect: Command
) -> None:
    with reading("scored", server.address) as reader:
        assert line_of(reader) == "held"
        lease_id = the_lease(inspect, reader)
        session_id = str(the_session(inspect, reader)["session_id"])

        said = inspect("--reclaim", session_id)
        plan = json.loads(inspect("--reclaim", lease_id, "--json"))
        nothing = inspect("--reclaim", "quarantined", "--yes")

        assert "nothing was done" in said
        assert lease_id in said
        assert (plan["done"], plan["leases"], plan["size_bytes"]) == (False, [lease_id], 4096)
        assert nothing == "reclaimed quarantined: 0 sessions and 0 leases ended, 0 B came free\n"
        go_on(reader)
        assert line_of(reader) == "fresh"


def test_the_steps_of_a_teacher_that_everybody_left_can_be_taken(
    server: tl.testing.ServerProcess, inspect: Command
) -> None:
    with published(server.address) as (teacher_id, _):
        with pytest.raises(NotAllowedError, match="has publishers or students"):
            inspect("--reclaim", f"teacher:{teacher_id}", "--yes")

    said = inspect("--reclaim", f"teacher:{teacher_id}")
    done = inspect("--reclaim", f"teacher:{teacher_id}", "--yes")

    assert said.startswith(f"1 step of teacher {teacher_id} would be retired")
    assert "4 KiB came free" in done
    assert not [s for s in json.loads(inspect("--json"))["steps"] if s["teacher_id"] == teacher_id]


@pytest.mark.parametrize("yes", [[], ["--yes"]])
def test_what_is_not_there_cannot_be_reclaimed(
    server: tl.testing.ServerProcess, yes: list[str]
) -> None:
    epoch = server.readiness["epoch"]
    for target, error in (
        (f"s-{epoch}-00", SessionExpiredError),
        (f"l-{epoch}-00", LeaseLostError),
        ("teacher:nobody", UnknownTeacherError),
    ):
        with pytest.raises(error):
            cli.inspect([server.address, "--reclaim", target, *yes])


def test_the_log_says_what_was_taken_back(
    server: tl.testing.ServerProcess, inspect: Command
) -> None:
    with reading("scored", server.address) as reader:
        assert line_of(reader) == "held"
        lease = the_lease(inspect, reader)
        inspect("--reclaim", lease, "--yes")
        inspect("--reclaim", "quarantined", "--yes")
        said = [line for line in server.log_text().splitlines() if "reclaimed by force" in line]

    of_lease, of_all = said[-2:]
    assert f"what=lease id={lease} freed_bytes=" in of_lease
    assert "what=quarantined freed_bytes=0 leases=0 sessions=0" in of_all
