"""Drafts: payloads that were reserved and are not sealed, and where their bytes have come to.

Pure. A publisher that shares memory writes into a slab of its own, and its draft has no room
here. One that streams has room in the server's slabs and a writer at most, which keeps that
room whatever becomes of the reservation meanwhile.

A seal may be seen by its slot before its publisher says it, and all may be over by then: read,
returned and retired. Which those are is remembered until it does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    NotAllowedError,
    PayloadInvalidError,
    ReservationLapsedError,
)

if TYPE_CHECKING:
    from teacher_logits.payload import Extent, Payload


@dataclass(kw_only=True)
class Draft:
    """One reservation. Only its table and the ledger change it."""

    session_id: str
    payload: Payload
    row_positions: tuple[int, ...]
    #: Whether its bytes come to the server's own slabs.
    streams: bool
    #: Where it lies: room here, or the place that its publisher has announced.
    extent: Extent | None = None
    valid_count: int | None = None
    written_bytes: int = 0
    is_being_written: bool = False

    def check_written(self) -> None:
        """Refuse to seal what has not all come.

        Raises:
            PayloadInvalidError: bytes are missing, or coming.
        """
        need = self.payload.size_bytes
        if self.extent is not None and self.written_bytes >= need and not self.is_being_written:
            return
        raise PayloadInvalidError(
            f"payload {self.payload.payload_id} has {self.written_bytes} of its {need} bytes: "
            "write the rest before it is sealed",
            facts={"written_bytes": self.written_bytes, "size_bytes": need},
        )


class Drafts:
    """The reservations of all publishers, by the id that their payload will have."""

    def __init__(self) -> None:
        self._drafts: dict[str, Draft] = {}
        #: Payloads whose seal was seen and not said: their publishers' sessions.
        self._seen: dict[str, str] = {}

    def add(self, draft: Draft) -> None:
        """Take one in."""
        self._drafts[draft.payload.payload_id] = draft

    def find(self, payload_id: str) -> Draft | None:
        """Return one, or None where it has ended."""
        return self._drafts.get(payload_id)

    def get(self, session_id: str, payload_id: str) -> Draft:
        """Return a session's own.

        Raises:
            ReservationLapsedError: it has ended, or never was.
            NotAllowedError: another session has it.
        """
        draft = self._drafts.get(payload_id)
        if draft is None:
            raise ReservationLapsedError(
                f"nothing is reserved under payload id {payload_id[:128]!r}: it was sealed or "
                "abandoned, or its step was retired meanwhile; reserve the rows again",
                facts={"payload_id": payload_id[:128]},
            )
        if draft.session_id != session_id:
            raise NotAllowedError(
                f"payload {payload_id} is reserved by another session than {session_id}",
                facts={"payload_id": payload_id, "session_id": session_id},
            )
        return draft

    def count_of(self, session_id: str) -> int:
        """Count those of a session."""
        return sum(draft.session_id == session_id for draft in self._drafts.values())

    def announced(self, teacher_id: str) -> list[Draft]:
        """Return copies of those of a teacher whose place in a publisher's slab is known."""
        return [
            replace(draft)
            for draft in self._drafts.values()
            if not draft.streams
            and draft.extent is not None
            and draft.payload.teacher_id == teacher_id
        ]

    def end(self, payload_id: str) -> Extent | None:
        """Forget one; return the room that is free with that: not while somebody writes to it."""
        draft = self._drafts.pop(payload_id, None)
        if draft is None or draft.is_being_written or not draft.streams:
            return None
        return draft.extent

    def note_sealed(self, payload_id: str, session_id: str, *, is_said: bool) -> None:
        """Note that a session's draft is sealed, which it has said or will say yet."""
        if not is_said:
            self._seen[payload_id] = session_id

    def take_seen(self, session_id: str, payload_id: str) -> bool:
        """Say, once, whether a session's draft was seen to be sealed before it was said."""
        if self._seen.get(payload_id) != session_id:
            return False
        del self._seen[payload_id]
        return True

    def leave(self, session_id: str) -> None:
        """Learn that a session will say nothing more."""
        for payload_id in [each for each, owner in self._seen.items() if owner == session_id]:
            del self._seen[payload_id]

    def is_over(self, draft: Draft) -> bool:
        """Say whether one has ended."""
        return self._drafts.get(draft.payload.payload_id) is not draft

    def without_room(self, teacher_id: str, step: int) -> int:
        """Count those of a step that stream and have no room yet."""
        return sum(
            draft.streams
            and draft.extent is None
            and draft.payload.teacher_id == teacher_id
            and draft.payload.key is not None
            and draft.payload.key.step == step
            for draft in self._drafts.values()
        )
