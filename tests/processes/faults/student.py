"""The student role: a rank that scores and acquires, and reads every byte of what it is given."""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Protocol

import torch
from tests.processes.faults import content, stops
from tests.processes.faults.content import ENGINE, TEMPERATURES, TOP_K
from tests.processes.faults.roles import Role, Voice

import teacher_logits_client as tl
from teacher_logits.errors import ServerUnreachableError, StalePayloadError, TeacherLogitsError
from teacher_logits.v1 import line_pb2

ROW_COUNT = 4
CALL_SECONDS = 20.0


class Leased(Protocol):
    """A payload or a batch."""

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The columns by name."""

    def close(self) -> None:
        """Give it back."""


class Held:
    """Something leased, and what it must say."""

    def __init__(self, leased: Leased, teacher: str, step: int, rows: Iterable[int]) -> None:
        self.leased = leased
        self.says = (teacher, step, tuple(rows))

    def check(self, columns: Mapping[str, torch.Tensor], only: Iterable[str] = ()) -> None:
        """Read columns to the last byte."""
        content.check(columns, *self.says, only=only)


class StudentRole(Role):
    """One process with at most one client, and sessions and leases by names that the test gives."""

    points = stops.STUDENT

    def __init__(self, voice: Voice) -> None:
        super().__init__(voice)
        self.client: tl.Client | None = None
        self.sessions: dict[str, tl.Session] = {}
        self.held: dict[str, Held] = {}

    def connect(self, address: str, timeout: float = CALL_SECONDS) -> None:
        """Make the client."""
        self.client = tl.connect(address, timeout=timeout)

    def open(
        self,
        name: str,
        *,
        transport: str = "shared_memory",
        mode: str = "cow",
        teacher: str = "",
        student: str = "student",
        rank: int = 0,
        dp: int = 1,
        timeout: float = CALL_SECONDS,
    ) -> str:
        """Open a session, over one transport or the first of some; return what it came to."""
        assert self.client is not None
        size = ROW_COUNT if not teacher else 2 * ROW_COUNT
        profile = tl.StudentProfile(
            batch_grid=tl.BatchGrid(
                global_batch_size=size, data_parallel_size=dp, micro_batch_size=1
            ),
            data_parallel_rank=rank,
            teacher_id=teacher or ENGINE,
            top_k=TOP_K,
            temperatures=TEMPERATURES[1:],
            student_id=student,
            transports=tuple(map(tl.Transport, transport.split(","))),
        )
        session = self.client.open_session(profile, mode=tl.MapMode(mode), timeout=timeout)
        self.sessions[name] = session
        return str(session.transport and session.transport.value)

    def score(
        self, session: str, step: int, name: str = "held", timeout: float = CALL_SECONDS
    ) -> int:
        """Score the rows of a step of the engine's, read them, and hold them; return the pid."""
        rows = content.rows_of(ENGINE, step, range(ROW_COUNT))
        future = self.sessions[session].score(rows, timeout=timeout)
        self.held[name] = Held(future.result(timeout=timeout), ENGINE, step, range(ROW_COUNT))
        self.read(name)
        return os.getpid()

    def acquire(
        self, session: str, step: int, name: str = "held", timeout: float = CALL_SECONDS
    ) -> None:
        """Acquire a step of a publishers' teacher, read it, and hold it."""
        asked = self.sessions[session]
        teacher, dp = asked.teacher.teacher_id, asked.profile.batch_grid.data_parallel_size
        count = 2 * ROW_COUNT // dp
        first = asked.profile.data_parallel_rank * count
        rows = range(first, first + count)
        batch = asked.acquire(
            step=step, input_ids=content.rows_of(teacher, step, rows), timeout=timeout
        )
        self.held[name] = Held(batch, teacher, step, rows)
        self.read(name)

    def read_step(self, session: str, step: int, timeout: float = CALL_SECONDS) -> None:
        """Acquire a step, read it, and give it back."""
        self.acquire(session, step, f"step {step}", timeout)
        self.close(f"step {step}")

    def read(self, name: str = "held") -> None:
        """Read what is held: some columns, and the rest behind the point that is called so."""
        held = self.held[name]
        names = list(held.leased.columns)
        held.check(held.leased.columns, only=names[:2])
        self.stops.at("read")
        held.check(held.leased.columns, only=names[2:])
        held.check(held.leased.columns)

    def read_on(self, name: str = "held") -> tuple[int, bool]:
        """Read what is held until halted, and give it back.

        Return how many times it was wrong, and whether the end of its lease said so.
        """
        held, wrong = self.held.pop(name), 0
        while not self.halted.is_set():
            try:
                held.check(held.leased.columns)
            except content.WrongBytesError:
                wrong += 1
        self.halted.clear()
        try:
            held.leased.close()
        except StalePayloadError:
            return wrong, True
        return wrong, False

    def shout(self, session: str) -> None:
        """Ask on a session's line, and read no answer, for as long as the server takes it."""
        line = self.sessions[session]._reader.line
        assert line is not None
        request = line_pb2.LineRequest(get_slab=line_pb2.GetSlabRequest(slab_id="none"))
        with suppress(ServerUnreachableError):
            while line.post(request, until=time.monotonic() + 1, on_refusal=_ignore) is not None:
                pass

    def close(self, name: str = "held", *, twice: bool = False) -> None:
        """Give back what is held, and wait until the server has heard, or cannot."""
        held = self.held.pop(name)
        held.leased.close()
        if twice:
            held.leased.close()
        del held
        self.settle()

    def cycle(self, session: str, step: int, timeout: float = CALL_SECONDS) -> None:
        """Score, read, and give back."""
        self.score(session, step, f"cycle {step}", timeout)
        self.close(f"cycle {step}")

    def glance(self, session: str, step: int, timeout: float) -> None:
        """Score and read, and do not wait until it has gone back."""
        self.score(session, step, "glance", timeout)
        self.held.pop("glance").leased.close()

    def cycles(self, session: str, first: int) -> int:
        """Go through one cycle after the other until halted, and one more; return how many."""
        number = 0
        try:
            while not self.halted.is_set():
                self.cycle(session, first + number)
                number += 1
            self.cycle(session, first + number)
        finally:
            self.halted.clear()
        return number + 1

    def settle(self) -> None:
        """Wait until what was closed has gone back."""
        assert self.client is not None
        assert self.client._returner.wait(CALL_SECONDS)

    def shown(self, session: str) -> list[list[str]]:
        """Return what the calls of a session show."""
        assert self.client is not None
        metadata = self.client._calls._channels.shown.metadata
        return [list(pair) for pair in metadata(self.sessions[session].terms.session_id)]

    def leave(self, session: str) -> None:
        """Close a session."""
        self.sessions.pop(session).close()
        self.settle()

    def end(self) -> None:
        """Let everything go: leases, sessions and the client."""
        for name in list(self.held):
            self.held.pop(name).leased.close()
        self.sessions.clear()
        client, self.client = self.client, None
        if client is not None:
            thread = client._returner._thread
            client.close()
            thread.join(CALL_SECONDS)
            assert not thread.is_alive()

    def fork(self, name: str, path: str) -> int:
        """Fork a worker that reads what is held by the views that it inherits.

        It has no part in the role's pipe: it is driven over the socket at ``path``, by "read"
        and "end", and ends with the socket.
        """
        held = self.held[name]
        views = dict(held.leased.columns)
        held.check(views)  # what is right is worked out once, before the fork
        pid = os.fork()
        if pid == 0:
            try:
                _work(held, views, path)
            finally:
                os._exit(1)
        return pid


def _ignore(error: TeacherLogitsError) -> None:
    """Have no use for an answer."""


def _work(held: Held, views: Mapping[str, torch.Tensor], path: str) -> None:
    """Be a forked worker."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(path)
        with line.makefile("rw") as pipe:
            pipe.write(f"{os.getpid()}\n")
            pipe.flush()
            for command in pipe:
                if command == "end\n":
                    os._exit(0)
                try:
                    held.check(views)
                    pipe.write("right\n")
                except content.WrongBytesError as error:
                    pipe.write(f"{error}\n")
                pipe.flush()
