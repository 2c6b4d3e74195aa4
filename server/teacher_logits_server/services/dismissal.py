"""Dismissal: sessions of callers whom the server knows no more are closed, and their lines end.

A token that is taken out of ``--token-file`` ends what was opened with it, within a pass of the
clockwork and whether anybody calls or not: of each session whose caller has no token left for its
kind. It is closed as by its own client, so that room which may still be read is not reused before
the reader has let go of it; its line is shut from this side, which the client takes for the
session's end; calls of it that wait look again, and streams to it end with the next chunk.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from teacher_logits.errors import TeacherLogitsError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from teacher_logits_server.access import Access
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.services.publishing import PublisherCalls

_log = logging.getLogger(__name__)


class Dismissal:
    """Looks for sessions of callers who are known no more, and ends them.

    Args:
        publishing: hears of a publisher's seals before its session is closed.
        end: ends lines, waits and streams of sessions that are closed.
    """

    def __init__(
        self,
        *,
        access: Access,
        ledger: Ledger,
        publishing: PublisherCalls,
        end: Callable[[Collection[str]], None],
    ) -> None:
        self._access = access
        self._ledger = ledger
        self._publishing = publishing
        self._end = end

    def look(self) -> None:
        """End what is to be ended now."""
        known = self._access.kinds()
        if known is None:
            return
        unknown = self._ledger.unknown(known)
        for session_id in unknown:
            facts = {"session_id": session_id, **self._ledger.describe(session_id)}
            try:
                self._publishing.hear_seals(session_id)
                self._ledger.close_session(session_id)
            except TeacherLogitsError as error:  # ended meanwhile
                facts["error"] = error.message
            _log.warning("session ended: its caller is known no more", extra={"facts": facts})
        if unknown:
            self._end(unknown)
