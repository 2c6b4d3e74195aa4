"""Rooms: where a teacher worker's payloads lie until they are put, and what it answers for them.

A room is Ray's object store (``ObjectRoom``) or slabs of the worker's own (``slab_room``); the rest
of the worker's side does not know which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from teacher_logits_client.ray.fetching import check_in_cluster, typed_errors
from teacher_logits_client.ray.flat import FlatPayload

if TYPE_CHECKING:
    from typing import TypeAlias

    import ray

    from teacher_logits_client.ray.descriptions import PayloadDescription
    from teacher_logits_client.ray.flat import Bytes
    from teacher_logits_client.ray.slab_references import SlabReference

    Source: TypeAlias = "ray.ObjectRef[FlatPayload] | SlabReference"


@dataclass(frozen=True, kw_only=True)
class DeferredPayload:
    """What a teacher worker answers in its payload's place; ``source`` is None but of one replica.

    The reference stands in a field, and so Ray leaves it alone. Whoever holds it keeps the bytes.
    """

    description: PayloadDescription
    source: Source | None


class Room(Protocol):
    """Where the bytes of payloads lie until they are put."""

    def take(self, size_bytes: int) -> Bytes:
        """Return room that nobody reads."""

    def put(self, description: PayloadDescription, buffer: Bytes) -> Source:
        """Make what was written readable, and return what to open it by."""

    def give_back(self, buffer: Bytes) -> None:
        """Take room back that was not put."""


class ObjectRoom:
    """Room beside Ray's object store, used again: a put copies out of it, and is done with it."""

    def __init__(self) -> None:
        self._spare: list[Bytes] = []  # one at most; a list, of which two threads pop no one twice

    def take(self, size_bytes: int) -> Bytes:
        """Return room that nobody reads."""
        try:
            spare = self._spare.pop()
        except IndexError:
            spare = None
        if spare is None or spare.nbytes < size_bytes:
            return np.empty(size_bytes, dtype=np.uint8)
        return spare

    def put(self, description: PayloadDescription, buffer: Bytes) -> Source:
        """Copy the bytes into the object store.

        Raises:
            RequestInvalidError: this process is of no cluster.
            PoolFullError: it has no room.
        """
        import ray

        check_in_cluster(f"a payload of step {description.step}")
        flat = FlatPayload(description=description, buffer=buffer[: description.size_bytes])
        with typed_errors(f"{description.size_bytes} bytes put into Ray's object store"):
            reference = ray.put(flat)
        self.give_back(buffer)
        return reference

    def give_back(self, buffer: Bytes) -> None:
        """Keep room for the next payload."""
        if not self._spare:
            self._spare.append(buffer)
