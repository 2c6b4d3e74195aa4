"""Granted: how many leases a server has granted, and on how many bytes, by transport. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.transport import Transport


class Lent(NamedTuple):
    """Leases granted over one transport, and the bytes of their payloads."""

    leases: int = 0
    size_bytes: int = 0


class Granted:
    """Counts from the server's start on."""

    def __init__(self) -> None:
        self._by_transport: dict[Transport, Lent] = {}

    def add(self, transport: Transport, size_bytes: int) -> None:
        """Count a lease."""
        before = self._by_transport.get(transport, Lent())
        self._by_transport[transport] = Lent(before.leases + 1, before.size_bytes + size_bytes)

    def view(self) -> Mapping[Transport, Lent]:
        """Return what was granted so far."""
        return dict(self._by_transport)
