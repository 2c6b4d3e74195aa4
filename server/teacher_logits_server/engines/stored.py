"""Answers that stay where they are computed: of their rows the server has descriptions alone.

    rows of a pass, computed -> in the object store of that node
                                status of positions -> here -> finish -> payload of several parts

Promises: rows are given back once, and with them the room that was promised for all of them,
whatever becomes of the request: as it is dropped, or as the last lease on its payload ends.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from teacher_logits_server.engines.answers import Asked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from teacher_logits.layout import Column
    from teacher_logits_server.engines.answers import Part
    from teacher_logits_server.engines.keepers import Wanted
    from teacher_logits_server.engines.requests import Request


class StoredRows(Protocol):
    """Rows that lie in an object store.

    ``status`` has a byte for each of their positions, and none where all are fine.
    """

    @property
    def status(self) -> bytes:
        """What there is to say of each position."""

    def drop(self) -> None:
        """Let go of them; twice is fine."""


class NodeStores(Protocol):
    """The object stores of nodes; ``replicas.stores``."""

    def budgets(self, nodes: Collection[str]) -> dict[str, int]:
        """Return how much may stay on each node; one that is gone has nothing. Waits for it."""


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """Some rows of a payload, by their places in it, and where they lie."""

    rows: range
    positions: range
    stored: StoredRows


class StoredAnswer(Asked):
    """A request whose rows stay where they are computed.

    Args:
        near: the node that its reader says it is on; empty where that is not known.
        leave: gives back the room that was promised for it.
    """

    def __init__(
        self,
        request: Request,
        *,
        columns: Sequence[Column],
        wanted: Wanted,
        near: str = "",
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(request, columns=columns, wanted=wanted)
        self.near = near
        self._leave: Callable[[], None] | None = leave
        self._parts: list[StoredPart] = []
        # A payload is dropped by whichever thread its last lease ends on.
        self._lock = threading.Lock()

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        """What lies where, in the order of the rows."""
        with self._lock:
            return tuple(sorted(self._parts, key=lambda part: part.rows.start))

    def take_stored(self, part: Part, stored: StoredRows) -> None:
        """Take rows that were computed; they are this answer's from here on."""
        with self._lock:
            if self._leave is not None:
                made = StoredPart(rows=part.rows, positions=part.positions, stored=stored)
                self._parts.append(made)
                return
        stored.drop()

    def finish(self, *, mask: bool) -> int:
        """Return how many rows are bad, which are masked where they lie.

        Raises:
            PayloadInvalidError: without ``mask``, of the first bad row.
        """
        status = torch.zeros(self.request.position_count, dtype=torch.uint8)
        for part in self.parts:
            if part.stored.status:
                told = torch.frombuffer(bytearray(part.stored.status), dtype=torch.uint8)
                status[part.positions.start : part.positions.stop] = told
        _, bad = self.check(status, mask=mask)
        return len(bad)

    def drop(self) -> None:
        """Let go of all rows, and of the room; twice is fine."""
        with self._lock:
            parts, self._parts = self._parts, []
            leave, self._leave = self._leave, None
        for part in parts:
            part.stored.drop()
        if leave is not None:
            leave()
