"""Opening: how long a student waits to be let in, and for what.

    its teacher, or some of its publishers, have not come    as long as the call may
    every seat of its rank has its reader (``rank_taken``)   while one of them may be dead

Promises: whoever lives keeps its seat, and the newcomer is refused as soon as that shows: at once
where the kernel tells of the reader's end, and with the next sign of life where only a TTL does.
A reader that died gives its seat up as soon as that shows, and the newcomer gets it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import (
    DeadlinePassedError,
    DrainingError,
    NotAvailable,
    TeacherLogitsError,
)
from teacher_logits_server.broker.peers import is_gone
from teacher_logits_server.publishers import WAITABLE
from teacher_logits_server.steps.seats import Holder, RankTaken

if TYPE_CHECKING:
    from teacher_logits.profiles import StudentProfile
    from teacher_logits_server.ledger import Ledger, OpenedSession
    from teacher_logits_server.services.waiting import Waiting


class Opening:
    """One student's wait for its session.

    Args:
        request_id: of the call that opens it.
        profile: what the student says of itself.
    """

    def __init__(
        self, *, ledger: Ledger, request_id: str, protocol_version: int, profile: StudentProfile
    ) -> None:
        self._ledger = ledger
        self._request_id = request_id
        self._protocol_version = protocol_version
        self._profile = profile
        self._why: TeacherLogitsError | None = None
        self._looked_at = 0.0
        #: The last sign of life of each reader of the rank when it was first seen.
        self._heard_at: dict[str, float] = {}

    async def wait(self, waiting: Waiting, seconds: float) -> OpenedSession:
        """Open the session, ``seconds`` from now at the latest.

        Raises:
            RankTaken: others read the rank, and no seat came free.
            UnknownTeacherError, DeadlinePassedError: the teacher, or some of it, did not come.
            DrainingError: the server stops.
        """
        return await waiting.until(
            self._look, bell=waiting.teachers, seconds=seconds, too_late=self._too_late
        )

    async def _look(self) -> OpenedSession | None:
        self._looked_at = asyncio.get_running_loop().time()
        try:
            return self._ledger.open_session(
                request_id=self._request_id,
                protocol_version=self._protocol_version,
                profile=self._profile,
            )
        except RankTaken as error:
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
        return None

    def _may_be_dead(self, holder: Holder) -> bool:
        if holder.seconds_left is None:
            return is_gone(holder.pid, holder.started)
        return holder.heard_at <= self._heard_at.setdefault(holder.session_id, holder.heard_at)

    def _too_late(self, waited: float) -> TeacherLogitsError:
        error = self._why
        assert error is not None  # there was a look that found nothing
        if isinstance(error, RankTaken):
            return self._taken_still(error)
        facts = {**error.facts, "waited_seconds": waited}
        within = f"{span_text(waited)} (the shorter of the call's deadline and --default-wait)"
        if isinstance(error, NotAvailable):
            return DeadlinePassedError(
                f"the teacher is not all there after {within}: {error.message}", facts=facts
            )
        return type(error)(
            f"{error.message}; it was waited for {within}: start its publishers, or mend the name",
            facts=facts,
        )

    def _taken_still(self, error: RankTaken) -> RankTaken:
        """Return the refusal with what is left by now, and when another try may help."""
        since = asyncio.get_running_loop().time() - self._looked_at
        holders = [
            each
            if each.seconds_left is None
            else replace(each, seconds_left=max(0.0, each.seconds_left - since))
            for each in error.holders
        ]
        late = RankTaken(self._profile, holders)
        left = [each.seconds_left for each in holders if each.seconds_left is not None]
        if left:
            late.retry_after = timedelta(seconds=min(left))
        return late
