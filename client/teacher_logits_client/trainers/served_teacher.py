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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError, RequestInvalidError, SessionRefusedError
from teacher_logits_client.config import check_timeout
from teacher_logits_client.connecting import connect
from teacher_logits_client.trainers.vocabulary import check_head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from teacher_logits.errors import Violation
    from teacher_logits.profiles import StudentProfile
    from teacher_logits_client.client import Client
    from teacher_logits_client.rows.flat_rows import Rows
    from teacher_logits_client.scoring.futures import ScoreFuture
    from teacher_logits_client.student import Session
    from teacher_logits_client.targets import Targets
    from teacher_logits_client.trainers.batch_rows import BatchRows


CONNECT_TIMEOUT_SECONDS = 60.0
"""How long a server is waited for that loads its teacher while the trainer starts."""

_TRUNCATING_PROFILE = "StudentProfile(vocabulary_policy=tl.VocabularyPolicy.TRUNCATE)"


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """Where the teacher is, and how far ahead it is asked.

    ``address`` as ``connect`` takes it; ``ahead`` batches are asked for behind the one in use;
    ``timeout`` in seconds is one request's, and how long a server that is not there yet is
    waited for: the server's ``--default-wait``, and 60 s, where None. ``top_k_setting`` is what
    the trainer calls the ids a position, for what is said of them.

    Raises:
        ConfigError: there is no address, or a number makes no sense.
    """

    address: str | None
    temperature: float = 1.0
    ahead: int = 2
    timeout: float | None = None
    insecure: bool = False
    top_k_setting: str = "top_k"

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
        if self.timeout is not None:
            check_timeout(self.timeout, what="teacher_timeout")

    @property
    def connect_timeout(self) -> float:
        """Seconds for a server that is not there yet, or loads its teacher."""
        return CONNECT_TIMEOUT_SECONDS if self.timeout is None else self.timeout


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

    ``settings`` are asked for whenever they are needed, so that what a trainer's arguments are
    set to later holds: the address from the next connection on, the rest at once.
    ``make_profile`` is asked for what this rank says of itself when a connection is opened, and
    ``head_rows`` for how many ids its student can say, 0 where that is not known.
    ``waited_seconds`` is how long the student has stood still for it.
    """

    def __init__(
        self,
        settings: Callable[[], TeacherSettings],
        make_profile: Callable[[], StudentProfile],
        head_rows: Callable[[], int] = lambda: 0,
    ) -> None:
        self._settings = settings
        self._make_profile = make_profile
        self._head_rows = head_rows
        # A batch that nobody will use any more takes its request along.
        self._planned: deque[tuple[int, weakref.ref[Request]]] = deque()
        self._numbers = 0
        self._entered = 0
        self._stack = ExitStack()
        self._session: Session | None = None
        self.waited_seconds = 0.0
        self._waited_before = 0.0

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
            settings = self._settings()
            with ExitStack() as stack:
                client = stack.enter_context(
                    connect(
                        settings.address or "",
                        timeout=settings.connect_timeout,
                        insecure=settings.insecure,
                    )
                )
                session = stack.enter_context(self._open_session(client))
                check_head(self._head_rows(), session.teacher, session.profile.vocabulary_policy)
                self._session = session
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

    def _open_session(self, client: Client) -> Session:
        try:
            return client.open_session(self._make_profile())
        except SessionRefusedError as error:
            named = [self._as_set(violation) for violation in error.violations]
            raise SessionRefusedError(named) from None

    def _as_set(self, violation: Violation) -> Violation:
        """Return a violation that names the trainer's settings, and no profile's fields."""
        message = violation.message.replace(_TRUNCATING_PROFILE, "vocabulary_policy='truncate'")
        if violation.rule == "top_k_too_large":
            message = message.replace("top_k is", f"{self._settings().top_k_setting} is", 1)
        return replace(violation, message=message)

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
        last = request.number + self._settings().ahead
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
            yield payload.targets_at(self._settings().temperature)

    def waited_lately(self) -> float:
        """Return the seconds that were waited since this was asked last, to a tenth of a ms."""
        lately = self.waited_seconds - self._waited_before
        self._waited_before = self.waited_seconds
        return round(lately, 4)

    def _send(self, request: Request) -> None:
        rows = request.rows
        if request.future is None:
            request.future = self.session.score(
                rows.rows,
                prefix_ids=request.prefixes,
                windows=rows.windows,
                timeout=self._settings().timeout,
            )
