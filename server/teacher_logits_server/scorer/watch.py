"""Watch: what the passes of one scorer take, how full they are, and the spans that show them.

    batch         from a pass's start until what it came to is published
    engine_pass   what of that the engine took

On the scorer's thread. Spans are made for those who are traced alone (``tracing``).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from teacher_logits import tracing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.trace import Span

    from teacher_logits_server.engines.answers import Part
    from teacher_logits_server.engines.passes import Outcome
    from teacher_logits_server.metrics.instruments import PassTimes
    from teacher_logits_server.scorer.jobs import Work


@dataclass(kw_only=True)
class _Pass:
    began: float
    parts_left: int
    batch: Span | None
    computing: Span | None


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
        tokens: list[int] = []
        for work, part in parts:
            if not part.first_row and self._times is not None:
                self._times.queued(now - work.submitted_at)
            tokens += work.plan.request.computed_tokens()[part.first_row :][: part.row_count]
        if self._times is not None:
            self._times.started(tokens, self._max_batch_tokens)
        facts = {"requests": len(parts), "rows": len(tokens), "tokens": sum(tokens)}
        traced = [work.job.trace for work, _ in parts if work.job.trace is not None]
        batch = tracing.start("batch", facts, above=traced)
        computing = None if batch is None else tracing.start("engine_pass", facts, above=[batch])
        one = _Pass(began=perf_counter(), parts_left=len(parts), batch=batch, computing=computing)
        self._passes.update((part, one) for _, part in parts)

    @contextmanager
    def settling(self, outcome: Outcome) -> Iterator[None]:
        """Note that some parts of a pass are over, around what is done with them."""
        ended = [self._passes.pop(part) for part in outcome.parts if part in self._passes]
        for one in ended:
            one.parts_left -= 1
        done = {id(one): one for one in ended if not one.parts_left}
        for one in done.values():
            if self._times is not None:
                self._times.took(perf_counter() - one.began)
            _end(one.computing, outcome.error)
        try:
            yield
        finally:
            for one in done.values():
                _end(one.batch, outcome.error)


def _end(span: Span | None, error: Exception | None) -> None:
    if span is not None:
        if error is not None:
            tracing.fail(span, error)
        span.end()
