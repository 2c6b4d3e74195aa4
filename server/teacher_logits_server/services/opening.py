"""Opening: how long a session's place is waited for, and for what; a student's or a publisher's.

    its teacher, or some of its publishers, have not come    as long as the call may
    every seat of its rank has its reader (``rank_taken``)   while one of them may be dead
    another publishes its shard (``shard_taken``)            while that one may be dead

Promises: whoever lives keeps its place, and the newcomer is refused as soon as that shows: at once
where the kernel tells of the holder's end, and with the next sign of life where only a TTL does.
A holder that died gives its place up as soon as that shows, and the newcomer gets it. Whoever waits
is told for what, before its answer: a teacher's name may be mistyped, and since any server takes
publishers, nobody can know that none will come by it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from teacher_logits.clock import span_text
from teacher_logits.errors import (
    DeadlinePassedError,
    DrainingError,
    NotAvailable,
    TeacherLogitsError,
)
from teacher_logits.wire.waits import waits_to_metadata
from teacher_logits_server.admission.holders import Holder, PlaceTaken
from teacher_logits_server.broker.peers import is_gone
from teacher_logits_server.publishers import WAITABLE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from grpc.aio import ServicerContext

    from teacher_logits_server.ledger import Ledger, OpenedSession
    from teacher_logits_server.services.waiting import Waiting

Q = TypeVar("Q")
R = TypeVar("R")


def teller(context: ServicerContext[Q, R]) -> Callable[[str], Awaitable[None]]:
    """Return what tells a call's caller what it waits for, before its answer."""

    async def tell(text: str) -> None:
        await context.send_initial_metadata(waits_to_metadata(text))

    return tell


class Opening:
    """One newcomer's wait for its session.

    Args:
        admit: opens the session, or says why it cannot be; called with each change.
        tell: says to the newcomer what it waits for, once, as soon as it does.
    """

    def __init__(
        self,
        ledger: Ledger,
        admit: Callable[[], OpenedSession],
        tell: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._ledger = ledger
        self._admit = admit
        self._tell = tell
        self._seconds = 0.0
        self._why: TeacherLogitsError | None = None
        self._looked_at = 0.0
        #: The last sign of life of each holder when it was first seen.
        self._heard_at: dict[str, float] = {}

    async def wait(self, waiting: Waiting, seconds: float) -> OpenedSession:
        """Open the session, ``seconds`` from now at the latest.

        Raises:
            PlaceTaken: others have its place, and none came free.
            UnknownTeacherError, DeadlinePassedError: the teacher, or some of it, did not come.
            DrainingError: the server stops.
        """
        self._seconds = seconds
        return await waiting.until(
            self._look, bell=waiting.teachers, seconds=seconds, too_late=self._too_late
        )

    async def _look(self) -> OpenedSession | None:
        self._looked_at = asyncio.get_running_loop().time()
        try:
            return self._admit()
        except PlaceTaken as error:
            if self._ledger.draining or not any(map(self._may_be_dead, error.holders)):
                raise
            self._why = error
        except WAITABLE as error:
            if self._ledger.draining:
                raise DrainingError(
                    f"the server is shutting down, and {error.message}: try another, or this "
                    "one again once it is back"
                ) from None
            self._why = error
        if self._tell is not None:
            tell, self._tell = self._tell, None
            await tell(
                f"{self._why.message}; this is waited for up to {self._within(self._seconds)}"
            )
        return None

    def _within(self, seconds: float) -> str:
        return f"{span_text(seconds)} (the shorter of the call's deadline and --default-wait)"

    def _may_be_dead(self, holder: Holder) -> bool:
        if holder.seconds_left is None:
            return is_gone(holder.pid, holder.started)
        return holder.heard_at <= self._heard_at.setdefault(holder.session_id, holder.heard_at)

    def _too_late(self, waited: float) -> TeacherLogitsError:
        error = self._why
        assert error is not None  # there was a look that found nothing
        if isinstance(error, PlaceTaken):
            return error.after(asyncio.get_running_loop().time() - self._looked_at)
        facts = {**error.facts, "waited_seconds": waited}
        within = self._within(waited)
        if isinstance(error, NotAvailable):
            return DeadlinePassedError(
                f"the teacher is not all there after {within}: {error.message}", facts=facts
            )
        return type(error)(
            f"{error.message}; it was waited for {within}: start its publishers, or mend the name",
            facts=facts,
        )
