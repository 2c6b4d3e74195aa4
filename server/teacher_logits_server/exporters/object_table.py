"""Which payloads are in the object store, for which leases, and who waits for room there.

Pure. One object serves all leases on its payload; its bytes count against the budget from when it
is to be put until the last of these leases has ended:

    ask     no object, room     Put                         -> told by ``put_done``, ``put_failed``
            no object, no room  nothing: it waits, first come first
            an object           nothing, or what it waits for is under way
    let_go  leases are left     Revoke: this lease may not be handed the reference any more
            none is left        Drop

Promises: a failed put is an error of the lease that had it put, once, and the others ask again,
each with its own patience; an object whose last lease ends while it is being put is dropped as soon
as it is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from teacher_logits.errors import PoolFullError

if TYPE_CHECKING:
    from collections.abc import Collection

    from teacher_logits.errors import TeacherLogitsError

_RETRY_AFTER = timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True)
class Put:
    """To be done: put an object."""

    object_id: str


@dataclass(frozen=True, kw_only=True)
class Revoke:
    """To be done: have a lease handed the reference of an object no more."""

    object_id: str
    lease_id: str


@dataclass(frozen=True, kw_only=True)
class Drop:
    """To be done: let go of an object."""

    object_id: str


Undo: TypeAlias = "Revoke | Drop"


@dataclass(kw_only=True)
class _Object:
    object_id: str
    payload_id: str
    size_bytes: int
    asked_by: str
    is_there: bool = False
    leases: set[str] = field(default_factory=set)
    #: Of leases that ended while it was being put.
    undo: list[Undo] = field(default_factory=list)


class ObjectTable:
    """The objects of one server. ``budget_bytes`` bounds them all together."""

    def __init__(self, *, epoch: str, budget_bytes: int) -> None:
        self._epoch = epoch
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._made = 0
        self._objects: dict[str, _Object] = {}
        self._by_payload: dict[str, _Object] = {}
        self._by_lease: dict[str, _Object] = {}
        #: Leases that wait for room, in the order in which they asked, and how much.
        self._waiting: dict[str, int] = {}
        self._errors: dict[str, TeacherLogitsError] = {}

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def waiting_count(self) -> int:
        """Leases that wait for room."""
        return len(self._waiting)

    def find(self, lease_id: str) -> str | None:
        """Return a lease's object, once it is there.

        Raises:
            TeacherLogitsError: it could not be put; told once.
        """
        error = self._errors.pop(lease_id, None)
        if error is not None:
            raise error
        found = self._by_lease.get(lease_id)
        return found.object_id if found is not None and found.is_there else None

    def ask(self, lease_id: str, payload_id: str, size_bytes: int) -> Put | None:
        """Have a lease's payload in the store; return what is to be done for that now.

        Raises:
            PoolFullError: it is larger than the budget.
        """
        if lease_id in self._by_lease:
            return None
        found = self._by_payload.get(payload_id)
        work = None
        if found is None:
            if size_bytes > self.budget_bytes:
                raise self.full(size_bytes)
            self._waiting.setdefault(lease_id, size_bytes)
            is_first = next(iter(self._waiting)) == lease_id
            if not is_first or self.used_bytes + size_bytes > self.budget_bytes:
                return None
            found = self._add(lease_id, payload_id, size_bytes)
            work = Put(object_id=found.object_id)
        self._waiting.pop(lease_id, None)
        found.leases.add(lease_id)
        self._by_lease[lease_id] = found
        return work

    def waits(self, lease_id: str) -> int | None:
        """Return the bytes for which a lease waits for room; None where it does not."""
        return self._waiting.get(lease_id)

    def give_up(self, lease_id: str) -> None:
        """Have a lease wait for room no more; one that does not is fine."""
        self._waiting.pop(lease_id, None)

    def full(self, size_bytes: int) -> PoolFullError:
        """Return the error for a payload that found no room."""
        free = self.budget_bytes - self.used_bytes
        never = size_bytes > self.budget_bytes
        return PoolFullError(
            f"a payload of {size_bytes} bytes is to go into the object store, and of its budget of "
            f"{self.budget_bytes} bytes {free} are free: "
            + ("it never fits; " if never else "give leases back, or ")
            + "raise --ray-budget on the server, or allow 'stream'",
            facts={
                "need_bytes": size_bytes,
                "free_bytes": free,
                "used_bytes": self.used_bytes,
                "budget_bytes": self.budget_bytes,
                "waiting": len(self._waiting),
            },
            retry_after=None if never else _RETRY_AFTER,
        )

    def put_done(self, object_id: str) -> list[Undo]:
        """Learn that an object is there; return what is to be undone already."""
        found = self._objects[object_id]
        found.is_there = True
        if not found.leases:
            return [self._drop(found)]
        undo, found.undo = found.undo, []
        return undo

    def put_failed(self, object_id: str, error: TeacherLogitsError) -> None:
        """Learn that an object could not be put: its leases may ask again."""
        found = self._objects[object_id]
        if found.asked_by in found.leases:
            self._errors[found.asked_by] = error
        self._drop(found)

    def let_go(self, lease_ids: Collection[str]) -> list[Undo]:
        """Learn that leases have ended; return what is to be done."""
        due: list[Undo] = []
        for lease_id in lease_ids:
            self._waiting.pop(lease_id, None)
            self._errors.pop(lease_id, None)
            found = self._by_lease.pop(lease_id, None)
            if found is None:
                continue
            found.leases.discard(lease_id)
            if found.is_there and not found.leases:
                due.append(self._drop(found))
                continue
            revoke = Revoke(object_id=found.object_id, lease_id=lease_id)
            (due if found.is_there else found.undo).append(revoke)
        return due

    def _add(self, lease_id: str, payload_id: str, size_bytes: int) -> _Object:
        self._made += 1
        object_id = f"o-{self._epoch}-{self._made}"
        made = _Object(
            object_id=object_id, payload_id=payload_id, size_bytes=size_bytes, asked_by=lease_id
        )
        self._objects[object_id] = self._by_payload[payload_id] = made
        self.used_bytes += size_bytes
        return made

    def _drop(self, found: _Object) -> Drop:
        del self._objects[found.object_id], self._by_payload[found.payload_id]
        for lease_id in found.leases:
            self._by_lease.pop(lease_id, None)
        self.used_bytes -= found.size_bytes
        return Drop(object_id=found.object_id)
