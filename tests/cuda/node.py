"""A pretended node: one server, workers with fake drivers, and what their drivers were asked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from tests.cuda.teaching import Teaching
from tests.cuda.workers import WorkerError
from tests.fake_cuda.log import (
    Operation,
    done,
    faults,
    holders,
    read_log,
)
from tests.fake_cuda.spec import Spec
from tests.processes.test_fifty_steps import await_true
from tests.reports.raw import connect_raw

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cuda.workers import Crew, Worker

    from teacher_logits.v1.operator_service_pb2 import InspectResponse

_names = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a test has. Each test has a folder, and so a log, of its own, and a teacher's name."""

    address: str
    crew: Crew
    folder: Path
    teaching: Teaching = field(
        default_factory=lambda: Teaching(teacher_id=f"device-{next(_names)}")
    )

    def spec(self, **given: object) -> Spec:
        """Return what a process of this node makes its driver of."""
        return Spec(folder=str(self.folder), **given)  # type: ignore[arg-type]

    def teach(self, **given: object) -> Teaching:
        """Return the test's teacher with other settings."""
        return replace(self.teaching, **given)  # type: ignore[arg-type]

    def worker(self, name: str, spec: Spec | None = None, *, driver: bool = True) -> Worker:
        """Return a worker that has connected; without ``driver`` it has none and finds none."""
        worker = self.crew[name]
        worker.ask("connect", self.address, (spec or self.spec()).dumps() if driver else None)
        return worker

    def publisher(
        self,
        teaching: Teaching | None = None,
        *,
        name: str = "publisher",
        rank: int = 0,
        spec: Spec | None = None,
        **settings: object,
    ) -> Worker:
        """Return a worker that is admitted as a publisher with slabs on the first device.

        Once the server knows that the last of its shard is gone, where that was killed.
        """
        worker = self.worker(name, spec)

        def is_admitted() -> bool:
            try:
                worker.ask("open_publisher", teaching or self.teaching, rank, **settings)
            except WorkerError as error:
                if error.told.rules != ("shard_taken",):
                    raise
                return False
            return True

        await_true(is_admitted)
        return worker

    def student(
        self,
        teaching: Teaching | None = None,
        *,
        name: str = "student",
        spec: Spec | None = None,
        **wishes: object,
    ) -> tuple[Worker, Terms]:
        """Return a worker that is admitted as a student, and what its session came to."""
        worker = self.worker(name, spec)
        told = worker.ask("open_session", teaching or self.teaching, **wishes)
        return worker, Terms(cast("dict[str, object]", told))

    def log(self) -> list[Operation]:
        """Return what all drivers of this test were asked."""
        return read_log(self.folder)

    def done(self, call: str, *, worker: Worker | None = None) -> list[Operation]:
        """Return the calls of a name that were not refused, of one worker or of all."""
        return [each for each in done(self.log(), call) if worker is None or each.pid == worker.pid]

    def inspect(self) -> InspectResponse:
        """Return what the server has."""
        with connect_raw(self.address) as raw:
            return raw.inspect()

    def await_ends(self) -> None:
        """Wait until the server knows of all that a test has killed.

        A step that one of them has not read would else be kept for it, once the others are gone.
        """

        def there_are_some() -> bool:
            sessions = self.inspect().sessions
            known = {e.pid for e in sessions if e.liveness == "line" or e.state == "opening"}
            return bool(known & self.crew.killed)

        await_true(lambda: not there_are_some())

    def assert_nothing_is_left(self, *dead: int) -> None:
        """No memory is open or allocated, but of the processes that died; no rule was broken."""
        await_true(lambda: holders(self.log()) <= set(dead))
        assert faults(self.log()) == []


class Terms:
    """What a session came to, in plain values."""

    def __init__(self, told: dict[str, object]) -> None:
        self.session_id = str(told["session_id"])
        self.transport = told["transport"]
        self.transports = cast("dict[str, str | None]", told["transports"])
        self.refusals = cast("list[dict[str, str]]", told["refusals"])

    def refusal(self, transport: str = "cuda_ipc") -> dict[str, str]:
        """Return why a transport was refused."""
        (found,) = [each for each in self.refusals if each["transport"] == transport]
        return found
