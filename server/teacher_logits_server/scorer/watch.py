"""Watch: what the passes of one scorer take, and how full they are. On the scorer's thread."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from teacher_logits_server.engines.answers import Part
    from teacher_logits_server.metrics.instruments import PassTimes
    from teacher_logits_server.scorer.jobs import Work


@dataclass(kw_only=True)
class _Pass:
    began: float
    parts_left: int


class PassWatch:
    """Measures passes from their start until the last of their parts is over.

    Args:
        times: where to; None measures nothing.
        max_batch_tokens: what a full pass has.
    """

    def __init__(self, times: PassTimes | None, *, max_batch_tokens: int) -> None:
        self._times = times
        self._max_batch_tokens = max_batch_tokens
        self._passes: dict[Part, _Pass] = {}

    def started(self, parts: Sequence[tuple[Work, Part]], *, now: float) -> None:
        """Note a pass that starts ``now``, by the server's clock."""
        if self._times is None:
            return
        tokens: list[int] = []
        for work, part in parts:
            if not part.first_row:
                self._times.queued(now - work.submitted_at)
            tokens += work.plan.request.computed_tokens()[part.first_row :][: part.row_count]
        self._times.started(tokens, self._max_batch_tokens)
        one = _Pass(began=perf_counter(), parts_left=len(parts))
        self._passes.update((part, one) for _, part in parts)

    def over(self, parts: Iterable[Part]) -> None:
        """Note that some parts of passes are over, however they ended."""
        for part in parts:
            one = self._passes.pop(part, None)
            if one is None or self._times is None:
                continue
            one.parts_left -= 1
            if not one.parts_left:
                self._times.took(perf_counter() - one.began)
