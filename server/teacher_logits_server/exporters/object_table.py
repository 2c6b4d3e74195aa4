"""Which payloads are in the object store, for which leases, and who waits for room there.

Pure. One object serves all leases on its payload; its bytes count against the budget from when it
is to be put until the last of these leases has ended:

    ask     no object, room     Put: with this lease's token        -> told by ``put_done``
            no object, no room  nothing: it waits, first come first
            an object           Grant: this lease's token           -> told by ``granted``
    let_go  leases are left     Revoke the token
            none is left        Drop the object

Promises: a lease gets one token, and a ticket once its token was granted; a failed put is an error
of every lease that asked for it, once; an object whose last lease ends while it is being put is
dropped as soon as it is there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from teacher_logits.errors import PoolFullError

if TYPE_CHECKING:
    from collections.abc import Collection

    from teacher_logits.errors import TeacherLogitsError

TOKEN_BYTES = 16
_RETRY_AFTER = timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True)
class Put:
    """To be done: put an object, and have the holder give it to who shows the token."""

    object_id: str
    token: bytes


@dataclass(frozen=True, kw_only=True)
class Grant:
    """To be done: have the holder give an object to who shows the token too."""

    object_id: str
    token: bytes


@dataclass(frozen=True, kw_only=True)
class Revoke:
    """To be done: have the holder give an object to this token no more."""

    object_id: str
    token: bytes


@dataclass(frozen=True, kw_only=True)
class Drop:
    """To be done: let go of an object."""

    object_id: str


Work: TypeAlias = "Put | Grant | Revoke | Drop"


@dataclass(kw_only=True)
class _Object:
    object_id: str
    payload_id: str
    size_bytes: int
    is_there: bool = False
    #: Tokens by lease.
    tokens: dict[str, bytes] = field(default_factory=dict)
    granted: set[bytes] = field(default_factory=set)


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
        #: Leases that wait for room, in the order in which they asked.
        self._waiting: dict[str, int] = {}
        self._errors: dict[str, TeacherLogitsError] = {}

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def waiting_count(self) -> int:
        """Leases that wait for room."""
        return len(self._waiting)

    def ticket(self, lease_id: str) -> tuple[str, bytes] | None:
        """Return a lease's object and token, once that was granted.

        Raises:
            TeacherLogitsError: its object could not be put; told once.
        """
        error = self._errors.pop(lease_id, None)
        if error is not None:
            raise error
        found = self._by_lease.get(lease_id)
        token = found.tokens[lease_id] if found is not None else b""
        if found is None or token not in found.granted:
            return None
        return found.object_id, token

    def ask(self, lease_id: str, payload_id: str, size_bytes: int) -> Put | Grant | None:
        """Have a lease's payload in the store; return what is to be done for that now.

        Raises:
            PoolFullError: it is larger than the budget.
        """
        if lease_id in self._by_lease:
            return None
        found = self._by_payload.get(payload_id)
        is_new = found is None
        if found is None:
            if size_bytes > self.budget_bytes:
                raise self.full(size_bytes)
            self._waiting.setdefault(lease_id, size_bytes)
            is_first = next(iter(self._waiting)) == lease_id
            if not is_first or self.used_bytes + size_bytes > self.budget_bytes:
                return None
            found = self._add(payload_id, size_bytes)
        self._waiting.pop(lease_id, None)
        token = secrets.token_bytes(TOKEN_BYTES)
        found.tokens[lease_id] = token
        self._by_lease[lease_id] = found
        if is_new:
            return Put(object_id=found.object_id, token=token)
        return Grant(object_id=found.object_id, token=token) if found.is_there else None

    def give_up(self, lease_id: str) -> None:
        """Have a lease wait for room no more; one that does not is fine."""
        self._waiting.pop(lease_id, None)

    def waits(self, lease_id: str) -> int | None:
        """Return the bytes for which a lease waits for room; None where it does not."""
        return self._waiting.get(lease_id)

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

    def put_done(self, object_id: str, token: bytes) -> list[Work]:
        """Learn that an object is there, granted to the token that it was put with."""
        found = self._objects[object_id]
        found.is_there = True
        if not found.tokens:
            return [self._drop(found)]
        work: list[Work] = []
        if token in found.tokens.values():
            found.granted.add(token)
        else:  # its lease has ended meanwhile
            work.append(Revoke(object_id=object_id, token=token))
        others = (each for each in found.tokens.values() if each != token)
        return work + [Grant(object_id=object_id, token=each) for each in others]

    def put_failed(self, object_id: str, error: TeacherLogitsError) -> None:
        """Learn that an object could not be put: its leases may ask again."""
        found = self._objects[object_id]
        for lease_id in found.tokens:
            self._errors[lease_id] = error
        self._drop(found)

    def granted(self, object_id: str, token: bytes) -> list[Work]:
        """Learn that the holder gives an object to a token."""
        found = self._objects.get(object_id)
        if found is None:
            return []
        if token not in found.tokens.values():
            return [Revoke(object_id=object_id, token=token)]
        found.granted.add(token)
        return []

    def grant_failed(self, object_id: str, token: bytes, error: TeacherLogitsError) -> None:
        """Learn that the holder cannot be told: the lease may ask again."""
        found = self._objects.get(object_id)
        for lease_id, each in list(found.tokens.items()) if found is not None else ():
            if each == token:
                self._errors[lease_id] = error

    def let_go(self, lease_ids: Collection[str]) -> list[Work]:
        """Learn that leases have ended; return what is to be done."""
        work: list[Work] = []
        for lease_id in lease_ids:
            self._waiting.pop(lease_id, None)
            self._errors.pop(lease_id, None)
            found = self._by_lease.pop(lease_id, None)
            if found is None:
                continue
            token = found.tokens.pop(lease_id)
            if not found.is_there:
                continue  # ``put_done`` sees to it
            if not found.tokens:
                work.append(self._drop(found))
            elif token in found.granted:
                found.granted.discard(token)
                work.append(Revoke(object_id=found.object_id, token=token))
        return work

    def _add(self, payload_id: str, size_bytes: int) -> _Object:
        self._made += 1
        object_id = f"o-{self._epoch}-{self._made}"
        made = _Object(object_id=object_id, payload_id=payload_id, size_bytes=size_bytes)
        self._objects[object_id] = self._by_payload[payload_id] = made
        self.used_bytes += size_bytes
        return made

    def _drop(self, found: _Object) -> Drop:
        del self._objects[found.object_id], self._by_payload[found.payload_id]
        for lease_id in found.tokens:
            self._by_lease.pop(lease_id, None)
        self.used_bytes -= found.size_bytes
        return Drop(object_id=found.object_id)
