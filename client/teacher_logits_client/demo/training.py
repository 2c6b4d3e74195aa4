"""The training loop: the teacher scores the next rows while the student learns from these.

Several scoring requests are under way at any time, so that the student waits only where the
teacher is the slower of the two; how long it did is counted. A lease is returned as soon as
its step is taken.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.clock import span_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from teacher_logits_client.demo.config import DemoConfig
    from teacher_logits_client.demo.student import Student
    from teacher_logits_client.scoring.futures import ScoreFuture
    from teacher_logits_client.student import Session

SCORE_SECONDS = 300.0
"""Longer than any request takes: a teacher that needs more is stuck."""

_SECONDS_A_LINE = 5.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """What happened: the loss of each step, and where the time went."""

    losses: tuple[float, ...]
    seconds: float
    waited_seconds: float
    teacher_tokens: int

    @property
    def teacher_tokens_per_second(self) -> float:
        """Tokens that the teacher scored in a second of the training."""
        return self.teacher_tokens / max(self.seconds, 1e-9)

    @property
    def waiting_share(self) -> float:
        """The part of the training that the student spent waiting for the teacher."""
        return self.waited_seconds / max(self.seconds, 1e-9)


def train(
    student: Student,
    session: Session,
    rows: torch.Tensor,
    *,
    config: DemoConfig,
    say: Callable[[str], None],
) -> Training:
    """Train until the steps or the seconds are over; ``rows`` [N,S] come anew in each epoch."""
    losses: list[float] = []
    waited, tokens = 0.0, 0
    started = said = time.monotonic()
    batches = _batches(rows, config.rows_per_step, seed=config.seed)
    with _in_flight(session, batches, count=config.requests_ahead) as scored:
        for batch, future in scored:
            asked = time.monotonic()
            with future.result(timeout=SCORE_SECONDS) as payload:
                waited += time.monotonic() - asked
                progress = max(len(losses) / config.steps, (asked - started) / config.seconds)
                losses.append(student.learn(batch, payload.targets, progress=progress))
            tokens += batch.numel()
            now = time.monotonic()
            so_far = Training(
                losses=tuple(losses),
                seconds=now - started,
                waited_seconds=waited,
                teacher_tokens=tokens,
            )
            is_over = len(losses) >= config.steps or now - started >= config.seconds
            if is_over or now - said >= _SECONDS_A_LINE:
                said = now
                say(_line(so_far, config.steps))
            if is_over:
                break
    return so_far


def _batches(rows: torch.Tensor, size: int, *, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches for ever, the rows in a new order in each epoch."""
    generator = torch.Generator().manual_seed(seed)
    size = min(size, len(rows))
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for start in range(0, len(rows) - size + 1, size):
            yield rows[order[start : start + size]]


@contextmanager
def _in_flight(
    session: Session, batches: Iterator[torch.Tensor], *, count: int
) -> Iterator[Iterator[tuple[torch.Tensor, ScoreFuture]]]:
    """Keep ``count`` requests under way; those that nobody came for are cancelled at the end."""
    waiting: deque[tuple[torch.Tensor, ScoreFuture]] = deque()

    def ask() -> None:
        batch = next(batches)
        waiting.append((batch, session.score(batch, timeout=SCORE_SECONDS)))

    def answers() -> Iterator[tuple[torch.Tensor, ScoreFuture]]:
        while True:
            ask()  # before the student is busy with the oldest
            yield waiting.popleft()

    try:
        for _ in range(count):
            ask()
        yield answers()
    finally:
        for _, future in waiting:
            future.cancel()


def _line(training: Training, steps: int) -> str:
    recent = training.losses[-10:]
    return (
        f"  step {len(training.losses):>4} of {steps}  loss {sum(recent) / len(recent):.3f} nats  "
        f"teacher {training.teacher_tokens_per_second:,.0f} tokens/s  "
        f"waiting {100 * training.waiting_share:.0f} %  {span_text(training.seconds)}"
    )
