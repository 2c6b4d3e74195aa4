"""The desk of a publisher: what its drafts need of it, which must not hold it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.sessions.liveness import Liveness
    from teacher_logits_client.slabs.claims import Way


class PublisherDesk:
    """What a publisher's drafts need of it; see ``claims.Desk``."""

    def __init__(
        self, way: Way, *, liveness: Liveness, returner: Returner, default_seconds: float
    ) -> None:
        self.way = way
        self.liveness = liveness
        self.default_seconds = default_seconds
        self._returner = returner
        #: What was put off, and of that what was waited for.
        self._put_off = self._settled = 0

    def check(self) -> None:
        """See ``claims.Desk``."""
        self.liveness.check()

    def is_here(self) -> bool:
        """See ``claims.Desk``."""
        return self._returner.is_here

    def later(self, job: Callable[[], None]) -> None:
        """See ``claims.Desk``."""
        self._put_off += 1
        self._returner.later(job)

    def settle(self, *, until: float) -> None:
        """Wait for what was put off: rows that were given up before may be reserved then."""
        seen = self._put_off
        if seen != self._settled and self._returner.wait(max(0.0, until - time.monotonic())):
            self._settled = seen
