"""The ``local`` transport: readers in the server's own process find its slabs in a table.

Nothing moves: they read the writer's own memory. The secret in the table is what such a
reader proves, since another process cannot see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits import inprocess
from teacher_logits.transport import Transport

if TYPE_CHECKING:
    from teacher_logits_server.exporters import Slabs


class LocalExporter:
    """Enters the server of an epoch into the table of this process."""

    transport = Transport.LOCAL

    def __init__(self, *, epoch: str, slabs: Slabs) -> None:
        self._epoch = epoch
        self._resident = inprocess.Resident(find_slab=slabs.find)

    @property
    def secret(self) -> bytes:
        """What a reader of this process finds in the table and proves."""
        return self._resident.secret

    def start(self) -> None:
        """Make the server known."""
        inprocess.enter(self._epoch, self._resident)

    def stop(self) -> None:
        """Forget it."""
        inprocess.leave(self._epoch)
