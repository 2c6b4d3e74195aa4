"""Holders: who has the place that a newcomer asks for, and how it is told so.

Pure. A reader's place is its seat, a publisher's its shard. Whoever lives keeps its place; one that
may be dead is waited for (``services.opening``), and each refusal says when that shows at the
latest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import SessionRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.errors import Fact, Violation
    from teacher_logits.profiles import NodeHints

MAX_HOST_CHARS = 48
"""Of a host's name in a message."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who has a place. ``pid`` is 0 and ``started`` too where the kernel says nothing of it.

    ``heard_at`` is its last sign of life. ``seconds_left`` are those after which it counts as
    gone unless it gives another; None where the kernel tells of its end.
    """

    session_id: str
    hints: NodeHints
    heard_at: float
    seconds_left: float | None
    pid: int = 0
    started: int = 0


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a refusal says of those who have a place: in words, and in numbers."""

    text: str
    facts: dict[str, Fact]


class PlaceTaken(SessionRefusedError):
    """Others have the place. Waiting helps where one of them is dead.

    Args:
        describe: makes the broken rule of what is said of the holders.
        asks: the newcomer's own hints.
    """

    def __init__(
        self,
        describe: Callable[[Standing], Violation],
        holders: Sequence[Holder],
        *,
        asks: NodeHints,
    ) -> None:
        super().__init__([describe(standing(holders, asks=asks))])
        self.holders = tuple(holders)
        self._describe = describe
        self._asks = asks

    def after(self, seconds: float) -> PlaceTaken:
        """Return the refusal as it stands that much later, and when another try may help."""
        holders = [
            each
            if each.seconds_left is None
            else replace(each, seconds_left=max(0.0, each.seconds_left - seconds))
            for each in self.holders
        ]
        late = PlaceTaken(self._describe, holders, asks=self._asks)
        soonest = _soonest(holders)
        if soonest is not None:
            late.retry_after = timedelta(seconds=soonest)
        return late


def standing(holders: Sequence[Holder], *, asks: NodeHints) -> Standing:
    """Return what a newcomer is told of at least one holder."""
    first = holders[0]
    hints = first.hints
    pid, host = first.pid or hints.pid, hints.host_name[:MAX_HOST_CHARS]
    is_self = hints.pid == asks.pid != 0 and hints.host_name == asks.host_name
    text = "this very process" if is_self else f"process {pid} on {host or 'an unnamed host'}"
    if len(holders) > 1:
        text += f" and {len(holders) - 1} more"
    facts: dict[str, Fact] = {"pid": pid, "host_name": host}
    soonest = _soonest(holders)
    if soonest is not None:
        facts["free_within_seconds"] = soonest
        text += f" (should it be dead, the place is free within {span_text(soonest)})"
    return Standing(text=text, facts=facts)


def _soonest(holders: Sequence[Holder]) -> float | None:
    return min((h.seconds_left for h in holders if h.seconds_left is not None), default=None)
