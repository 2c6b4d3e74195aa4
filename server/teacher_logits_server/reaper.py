"""The reaper: one pass of the clockwork after another, for as long as the server runs.

A pass ends the sessions whose time has passed. It is late rather than wrong: a TTL counts
from the moment it passed, whenever a pass finds it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from teacher_logits_server.ledger import Ledger

_log = logging.getLogger(__name__)


class Reaper:
    """Sweeps the ledger on the server's loop.

    Args:
        every: time between two passes.
        also: what else is due once a pass, such as telling of the server's health.
    """

    def __init__(
        self, *, ledger: Ledger, every: timedelta, also: Callable[[], Awaitable[None]]
    ) -> None:
        self._ledger = ledger
        self._every_seconds = every.total_seconds()
        self._also = also

    async def run(self) -> None:
        """Make passes until cancelled. A pass that fails is logged; the next one comes."""
        while True:
            try:
                self.sweep()
                await self._also()
            except Exception:
                _log.exception("sweep failed")
            await asyncio.sleep(self._every_seconds)

    def sweep(self) -> None:
        """Make one pass."""
        for session_id in self._ledger.sweep():
            _log.warning("session expired", extra={"facts": {"session_id": session_id}})
