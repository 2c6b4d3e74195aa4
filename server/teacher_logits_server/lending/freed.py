"""Freed: what came free since that was last asked, for who waits and for whose room it is."""

from __future__ import annotations


class Freed:
    """What came free. Asked by the ledger, after each change."""

    def __init__(self) -> None:
        self._is_new = False
        self._foreign: list[tuple[str, str]] = []
        self._stored: list[str] = []
        #: Since the start, in all slabs and stores.
        self.total_bytes = 0

    def note(self, size_bytes: int = 0) -> None:
        """Note room of the server's own; without a size, that there may be some now."""
        self._is_new = True
        self.total_bytes += size_bytes

    def note_foreign(self, session_id: str, payload_id: str, size_bytes: int) -> None:
        """Note a payload's room in a slab of its publisher's."""
        self._foreign.append((session_id, payload_id))
        self.total_bytes += size_bytes

    def note_stored(self, payload_id: str, size_bytes: int) -> None:
        """Note a payload that nobody needs any more where it was computed."""
        self._stored.append(payload_id)
        self.note(size_bytes)

    def take(self) -> bool:
        """Say whether room of the server's own came free since this was last asked."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def take_foreign(self) -> list[tuple[str, str]]:
        """Return whose payloads came free in publishers' slabs: (session id, payload id)."""
        freed, self._foreign = self._foreign, []
        return freed

    def take_stored(self) -> list[str]:
        """Return the payloads that nobody needs any more where they were computed."""
        freed, self._stored = self._stored, []
        return freed
