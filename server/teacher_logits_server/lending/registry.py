"""The registry: sealed payloads, the extents they lie in, and who holds each one's room.

Pure. Four kinds of hold keep a payload's room from being reused:

    lease   a reader may read it; more may be granted while one lasts
    pin     the server itself is reading it, to stream it
    doubt   a reader that is gone but not proven gone
    step    its step is not retired yet; of registered payloads only

A payload is retired, and gives no new lease, once its step lets go of it; a scored one once its
last lease is gone. Its room is free when no hold is left, and in quarantine while doubts are
all that is left.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadRetiredError
from teacher_logits.terms import SERVER_WRITER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Extent, Payload


class Fate(enum.Enum):
    """What becomes of a payload's room after a hold on it has changed."""

    KEPT = "kept"
    QUARANTINED = "quarantined"
    FREE = "free"


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A sealed payload and where it lies.

    ``row_positions`` counts the positions of each row of a registered payload; it is empty for
    a scored one. ``writer_id`` says whose slab the extent is in, and ``owner`` is the session
    of a publisher that writes slabs of its own. ``on_device``: its columns over positions lie in
    device memory; then ``host_copy`` says whether the slab has copies of them. ``stays``: it lies
    in the object stores where it was computed; then there is an ``extent`` once it was brought.
    """

    payload: Payload
    extent: Extent | None
    row_positions: tuple[int, ...] = ()
    writer_id: str = SERVER_WRITER
    owner: str = ""
    on_device: bool = False
    host_copy: bool = True
    stays: bool = False

    @property
    def room(self) -> Extent:
        """Where it lies in a slab.

        Raises:
            ValueError: it stays where it was computed, and was not brought.
        """
        if self.extent is None:
            raise ValueError(f"payload {self.payload.payload_id} lies in no slab")
        return self.extent

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes where it lies."""
        return self.payload.size_bytes if self.extent is None else self.extent.size_bytes

    @property
    def is_registered(self) -> bool:
        """Whether a publisher wrote it."""
        return bool(self.row_positions)


@dataclass(kw_only=True)
class _Holds:
    sealed: Sealed
    leases: int = 0
    pins: int = 0
    doubts: int = 0
    step: bool = False
    retired: bool = False


class Registry:
    """The table of sealed payloads."""

    def __init__(self) -> None:
        self._holds: dict[str, _Holds] = {}

    def __iter__(self) -> Iterator[Sealed]:
        return iter([holds.sealed for holds in self._holds.values()])

    def seal(self, sealed: Sealed) -> None:
        """Take a payload in; a registered one is held by its step, another by nobody yet."""
        payload_id = sealed.payload.payload_id
        if payload_id in self._holds:
            raise ValueError(f"payload {payload_id} is sealed already")
        self._holds[payload_id] = _Holds(sealed=sealed, step=sealed.is_registered)

    def bring(self, payload_id: str, extent: Extent) -> Sealed:
        """Learn that a payload which stays elsewhere lies in a slab too."""
        holds = self._holds[payload_id]
        holds.sealed = replace(holds.sealed, extent=extent)
        return holds.sealed

    def open_payload(self, payload_id: str) -> Sealed:
        """Return a payload that gives new leases.

        Raises:
            PayloadRetiredError: it gives none any more, or never was.
        """
        holds = self._holds.get(payload_id)
        if holds is None or holds.retired:
            raise PayloadRetiredError(
                f"payload {payload_id[:128]!r} gives no new leases: a scored payload lasts while "
                "a session holds a lease on it, a registered one until its step is retired; score "
                "the rows again",
                facts={"payload_id": payload_id[:128]},
            )
        return holds.sealed

    def held(self, payload_id: str) -> Sealed:
        """Return a payload that somebody holds."""
        return self._holds[payload_id].sealed

    def is_held(self, payload_id: str) -> bool:
        """Say whether a payload was sealed and its room is not free yet."""
        return payload_id in self._holds

    def is_leased(self, payload_id: str) -> bool:
        """Say whether a payload has a lease."""
        holds = self._holds.get(payload_id)
        return holds is not None and holds.leases > 0

    def retire(self, payload_id: str) -> Fate:
        """Have a registered payload's step let go of it."""
        holds = self._holds[payload_id]
        if not holds.step:
            raise ValueError(f"no step holds payload {payload_id}")
        holds.step, holds.retired = False, True
        return self._fate(payload_id)

    def lend(self, payload_id: str) -> Sealed:
        """Count one lease more; refuses as ``open_payload`` does."""
        sealed = self.open_payload(payload_id)
        self._holds[payload_id].leases += 1
        return sealed

    def take_back(self, payload_id: str) -> Fate:
        """Count one lease less."""
        self._end_lease(payload_id)
        return self._fate(payload_id)

    def doubt(self, payload_id: str) -> Fate:
        """Turn a lease into a doubt: its reader is gone, and not proven gone."""
        self._end_lease(payload_id)
        self._holds[payload_id].doubts += 1
        return self._fate(payload_id)

    def clear_doubt(self, payload_id: str) -> Fate:
        """Count one doubt less: the reader has shown that it is gone."""
        holds = self._holds[payload_id]
        holds.doubts = _one_less(holds.doubts)
        return self._fate(payload_id)

    def pin(self, payload_id: str) -> Sealed:
        """Count one pin more on a payload that somebody holds."""
        holds = self._holds[payload_id]
        holds.pins += 1
        return holds.sealed

    def unpin(self, payload_id: str) -> Fate:
        """Count one pin less."""
        holds = self._holds[payload_id]
        holds.pins = _one_less(holds.pins)
        return self._fate(payload_id)

    def _end_lease(self, payload_id: str) -> None:
        holds = self._holds[payload_id]
        holds.leases = _one_less(holds.leases)
        holds.retired = holds.retired or (holds.leases == 0 and not holds.step)

    def _fate(self, payload_id: str) -> Fate:
        """Say what becomes of the room, and forget the payload once it is free."""
        holds = self._holds[payload_id]
        if holds.leases or holds.pins or holds.step:
            return Fate.KEPT
        if holds.doubts:
            return Fate.QUARANTINED
        del self._holds[payload_id]
        return Fate.FREE


def _one_less(count: int) -> int:
    if count < 1:
        raise ValueError("there is no such hold to end")
    return count - 1
