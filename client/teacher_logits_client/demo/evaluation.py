"""How good a student is on held-out text: divergence from the teacher, and perplexity.

The teacher scores the held-out rows once; their leases stay open until the end, so that
before and after are measured against the very same bytes.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits_client.demo.training import SCORE_SECONDS
from teacher_logits_client.losses import forward_kl

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from teacher_logits_client.demo.student import Student
    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.student import Session


@dataclass(frozen=True, kw_only=True)
class Quality:
    """``divergence`` is the mean KL (teacher ‖ student) a token with a tail bucket, in nats."""

    divergence: float
    perplexity: float


class HeldOut:
    """Held-out rows and their payloads; a context manager, which returns the leases."""

    def __init__(self, session: Session, rows: torch.Tensor, *, rows_a_request: int) -> None:
        """Have the teacher score rows [M,S]."""
        self._stack = ExitStack()
        self._scored: list[tuple[torch.Tensor, LeasedPayload]] = []
        try:
            futures = [
                (part, session.score(part, timeout=SCORE_SECONDS))
                for part in rows.split(rows_a_request)
            ]
            for part, future in futures:
                payload = self._stack.enter_context(future.result(timeout=SCORE_SECONDS))
                self._scored.append((part, payload))
        except BaseException:
            self._stack.close()
            raise

    @property
    def token_count(self) -> int:
        """Tokens of all rows."""
        return sum(part.numel() for part, _ in self._scored)

    def teacher_perplexity(self) -> float:
        """Return the teacher's own perplexity on these rows."""
        total, count = 0.0, 0
        for part, payload in self._scored:
            actual = payload.targets.actual_logprob
            if actual is not None:
                # A row's last position has no next token.
                known = actual.view(part.shape)[:, :-1]
                total, count = total - float(known.sum()), count + known.numel()
        return math.exp(total / count) if count else math.nan

    @torch.no_grad()
    def measure(self, student: Student) -> Quality:
        """Measure a student."""
        divergence = surprise = 0.0
        positions = tokens = 0
        for part, payload in self._scored:
            logits = student.logits(part)
            loss_sum, count = forward_kl(logits, payload.targets)
            divergence, positions = divergence + float(loss_sum), positions + int(count)
            next_logits = logits[:, :-1].flatten(0, 1).float()
            surprise += float(
                torch.nn.functional.cross_entropy(
                    next_logits, part[:, 1:].flatten(), reduction="sum"
                )
            )
            tokens += len(next_logits)
        return Quality(divergence=divergence / positions, perplexity=_perplexity(surprise / tokens))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._scored.clear()
        self._stack.close()


def _perplexity(nats: float) -> float:
    """Return e to the nats; infinite where that is too large for a float."""
    return math.exp(nats) if nats < 700 else math.inf
