"""What replicas have to do: passes, and those that one replica was sent. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits_server.replicas.instructions import Piece


@dataclass(kw_only=True, eq=False)
class Pass:
    """Rows that are computed together.

    ``over``: its deadline came while it was sent, and whoever waited has been told.

    ``node`` is where it has taken room, while it is sent; ``lacks_room``: it waits for that.
    """

    pieces: tuple[Piece, ...]
    deadline: float
    lost: int = 0
    over: bool = False
    node: str = ""
    lacks_room: bool = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of it that stay on the node that computes it."""
        return sum(piece.stored_bytes for piece in self.pieces)

    @property
    def tokens(self) -> int:
        """What it costs."""
        return sum(piece.tokens for piece in self.pieces)


@dataclass(kw_only=True, eq=False)
class Work:
    """What one replica has to do: passes by attempt, in the order in which they were sent.

    It computes the first of them, since ``began``.
    """

    passes: dict[int, Pass] = field(default_factory=dict)
    began: float = 0.0

    def send(self, attempt: int, given: Pass, now: float) -> None:
        """Note that it was sent a pass."""
        if not self.passes:
            self.began = now
        self.passes[attempt] = given

    def take(self, attempt: int, now: float) -> Pass:
        """Return a pass that it has answered, and forget it."""
        self.began = now
        return self.passes.pop(attempt)

    def due(self, patience: float) -> float | None:
        """When the first pass should be answered: one that began in time, at its deadline."""
        first = next(iter(self.passes.values()), None)
        if first is None:
            return None
        return first.deadline if first.deadline > self.began else self.began + patience

    @property
    def tokens(self) -> int:
        """What all of it costs."""
        return sum(each.tokens for each in self.passes.values())

    @property
    def has_retry(self) -> bool:
        """Whether it has rows that a replica ended with before."""
        return any(each.lost for each in self.passes.values())
