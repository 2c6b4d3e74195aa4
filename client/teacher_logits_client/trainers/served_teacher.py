"""A served teacher as a trainer uses it: asked some batches ahead, and waited for late.

Requests are planned in the order in which they will be used. Whoever is about to use one has it
and the ``ahead`` behind it sent first, then computes the student's side, and only then waits: so
the teacher scores the next batches while the student learns from this one. How long was waited
is counted.

The connection is open inside ``with``, which may be entered again inside itself; it belongs to
the process that entered it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError, RequestInvalidError
from teacher_logits_client.connecting import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from teacher_logits.profiles import StudentProfile
    from teacher_logits_client.flat_rows import Rows
    from teacher_logits_client.futures import ScoreFuture
    from teacher_logits_client.student import Session
    from teacher_logits_client.targets import Targets
    from teacher_logits_client.trainers.batch_rows import BatchRows


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """Where the teacher is, and how far ahead it is asked.

    ``address`` as ``connect`` takes it; ``ahead`` batches are asked for behind the one in use;
    ``timeout`` in seconds is one request's, the server's ``--default-wait`` where None, and
    ``connect_timeout`` that for a server that is not there yet.

    Raises:
        ConfigError: there is no address, or a number makes no sense.
    """

    address: str | None
    temperature: float = 1.0
    ahead: int = 2
    timeout: float | None = None
    connect_timeout: float = 60.0
    insecure: bool = False

    def __post_init__(self) -> None:
        if not self.address:
            raise ConfigError(
                "teacher_server is not given: give the address of a server, such as "
                "unix:/run/teacher-logits/teacher.sock (`teacher-logits serve` prints its own)"
            )
        if not isinstance(self.ahead, int) or self.ahead < 0:
            raise ConfigError(
                f"teacher_prefetch is {self.ahead!r}: give the batches to ask for ahead, from 0 on",
                facts={"teacher_prefetch": repr(self.ahead)},
            )


class Request:
    """A batch that the teacher is to score: planned, sent, and used once."""

    def __init__(self, number: int, rows: BatchRows, prefixes: Rows | None) -> None:
        self.number = number
        self.rows = rows
        self.prefixes = prefixes
        self.future: ScoreFuture | None = None

    def take(self) -> ScoreFuture:
        """Return the future of a request that was sent; sent again, it would be another."""
        future, self.future = self.future, None
        if future is None:
            raise RequestInvalidError(f"request {self.number} was used, or not sent: send it first")
        return future


class ServedTeacher:
    """One teacher's server, and this rank's session there.

    ``make_profile`` is asked for what this rank says of itself when a connection is opened.
    ``waited_seconds`` is how long the student has stood still for it.
    """

    def __init__(
        self, settings: TeacherSettings, make_profile: Callable[[], StudentProfile]
    ) -> None:
        self._settings = settings
        self._make_profile = make_profile
        # A batch that nobody will use any more takes its request along.
        self._planned: deque[tuple[int, weakref.ref[Request]]] = deque()
        self._numbers = 0
        self._entered = 0
        self._stack = ExitStack()
        self._session: Session | None = None
        self.waited_seconds = 0.0

    @property
    def session(self) -> Session:
        """The session.

        Raises:
            RequestInvalidError: it is not open.
        """
        if self._session is None:
            raise RequestInvalidError(
                "the teacher is asked outside of train, evaluate and predict, which keep its "
                "session open: do it inside `with trainer.teacher:`"
            )
        return self._session

    def __enter__(self) -> Self:
        if not self._entered:
            settings = self._settings
            with ExitStack() as stack:
                client = stack.enter_context(
                    connect(
                        settings.address or "",
                        timeout=settings.connect_timeout,
                        insecure=settings.insecure,
                    )
                )
                self._session = stack.enter_context(client.open_session(self._make_profile()))
                self._stack = stack.pop_all()
        self._entered += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered -= 1
        if not self._entered:
            self._planned.clear()
            self._session = None
            self._stack.close()

    def plan(self, rows: BatchRows, prefixes: Sequence[Sequence[int]] | None = None) -> Request:
        """Note that rows will be used next; they are sent when those before them are near."""
        self._numbers += 1
        request = Request(self._numbers, rows, prefixes)
        self._planned.append((request.number, weakref.ref(request)))
        return request

    def send(self, request: Request) -> None:
        """Have a request and those shortly behind it sent; what was sent is not sent again.

        Raises:
            TeacherLogitsError: whatever the client or the server refuse the rows for.
        """
        last = request.number + self._settings.ahead
        while self._planned and self._planned[0][0] <= last:
            near = self._planned.popleft()[1]()
            if near is not None:
                self._send(near)
        self._send(request)

    @contextmanager
    def targets(self, request: Request) -> Iterator[Targets]:
        """Wait for a request's targets.

        The lease ends with the block, and its last check with it: leave it before the
        optimizer's step. A request is used once.

        Raises:
            TeacherLogitsError: whatever became of it.
        """
        self.send(request)
        started = time.monotonic()
        payload = request.take().result()
        self.waited_seconds += time.monotonic() - started
        with payload:
            yield payload.targets_at(self._settings.temperature)

    def _send(self, request: Request) -> None:
        rows = request.rows
        if request.future is None:
            request.future = self.session.score(
                rows.rows,
                prefix_ids=request.prefixes,
                windows=rows.windows,
                timeout=self._settings.timeout,
            )
