"""Rows that stay: an object in the store of the node that computed them, and its room there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from teacher_logits_server.engines.stored import StoredAnswer

if TYPE_CHECKING:
    from collections.abc import Callable

    import ray

    from teacher_logits_server.engines.answers import Part


class StoredObject:
    """Some rows of a request, as ``engines.passes.Scores`` and ``engines.stored.StoredRows``.

    Args:
        status: of their positions, a byte each; nothing where all are fine.
        free: gives their room on the node back; called once.
    """

    def __init__(
        self,
        reference: ray.ObjectRef[object],
        *,
        node_id: str,
        status: bytes,
        free: Callable[[], None],
    ) -> None:
        self._reference: ray.ObjectRef[object] | None = reference
        self.node_id = node_id
        self.status = status
        self._free = free
        self._lock = threading.Lock()

    @property
    def reference(self) -> ray.ObjectRef[object]:
        """The object's; ValueError once the rows were let go of."""
        found = self._reference
        if found is None:
            raise ValueError("these rows were let go of")
        return found

    def copy_to(self, part: Part) -> None:
        """Give the rows to the answer that they belong to; nothing is copied."""
        if not isinstance(part.answer, StoredAnswer):
            raise ValueError("these rows stay where they are, and are written into no answer")
        part.answer.take_stored(part, self)

    def drop(self) -> None:
        """Let go of the object, and of its room; twice is fine."""
        with self._lock:
            was_held, self._reference = self._reference is not None, None
        if was_held:
            self._free()
