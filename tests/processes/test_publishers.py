"""Publishers in processes of their own, and what is left of what they wrote when they die."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests import forked
from tests.processes.running import PATIENCE_SECONDS, line_of
from tests.server.services.registry_rig import Wire, a_payload, a_student, bytes_of, serving

from teacher_logits.errors import ProducerLostError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.services.registry_rig import Student

ROOT = Path(__file__).parents[2]


class PublisherProcess:
    """A publisher that does as it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def do(self, command: str, step: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {step}\n")
        self.process.stdin.flush()
        done = {"publish": "sealed", "reserve": "reserved"}[command]
        assert line_of(self.process) == f"{done} {step}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)


@contextmanager
def publisher(address: str, shard: int, *, of: int) -> Iterator[PublisherProcess]:
    """A publisher, before it is ready; it is killed in the end if it still runs."""
    process: subprocess.Popen[str] = forked.Popen(
        [sys.executable, "-m", "tests.processes.publisher", address, str(shard), str(of)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield PublisherProcess(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def publishers(address: str, *, of: int) -> Iterator[list[PublisherProcess]]:
    """All publishers of a teacher, ready."""
    with ExitStack() as stack:
        crew = [stack.enter_context(publisher(address, shard, of=of)) for shard in range(of)]
        for each in crew:
            assert line_of(each.process) == "ready"
        yield crew


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with serving(tmp_path) as wire:
        yield wire


def reads_right(student: Student, *, step: int, of: int) -> bool:
    """Whether the step that comes next has the bytes that its publishers wrote."""
    grant = student.mailed()
    assert grant.step == step
    return all(
        student.read(lease) == bytes_of(a_payload(step, shard, of=of))
        for shard, lease in enumerate(grant.leases)
    )


def test_students_that_came_first_read_what_two_processes_write(wire: Wire) -> None:
    with ThreadPoolExecutor(2) as threads:
        opening = [
            threads.submit(wire.student, a_student(student_id=f"student-{number}"))
            for number in range(2)
        ]
        with publishers(wire.address, of=2) as (first, second):
            students = [each.result(PATIENCE_SECONDS) for each in opening]
            for student in students:
                student.want(0, 2)
            for step in (0, 1):
                first.do("publish", step)
                second.do("publish", step)

            assert all(reads_right(student, step=0, of=2) for student in students)
            assert all(reads_right(student, step=1, of=2) for student in students)


def test_a_publisher_that_is_killed_takes_along_what_nobody_has_leased(wire: Wire) -> None:
    with publishers(wire.address, of=2) as (first, second):
        student = wire.student(a_student())
        student.want(0)
        for each in (first, second):
            each.do("publish", 0)
        grant = student.mailed()
        student.want(1)
        first.do("publish", 1)
        first.kill()

        with pytest.raises(ProducerLostError, match="shard 0"):
            student.mailed()
        # What was leased stays good: the server keeps the descriptor, and the reader its map.
        assert [student.read(lease) for lease in grant.leases] == [
            bytes_of(a_payload(0, shard, of=2)) for shard in (0, 1)
        ]


def test_a_successor_writes_again_what_was_lost(wire: Wire) -> None:
    with publishers(wire.address, of=2) as (first, second):
        student = wire.student(a_student())
        for each in (first, second):
            each.do("publish", 0)
        first.do("reserve", 1)
        first.kill()
        wire.await_that(lambda view: len(view.sessions) == 2)
        with publisher(wire.address, 0, of=2) as successor:
            assert line_of(successor.process) == "ready"
            successor.do("publish", 0)
            student.want(0)

            assert reads_right(student, step=0, of=2)
            successor.do("publish", 1)
