"""Causality: does what is served for position s depend on the tokens up to s, and on no other?

The probe scores one row twice as it is and once with token j changed. Position s is the
distribution of token s+1 given tokens 0..s, so the first position to move must be exactly j.
Later, and the server hands out each distribution one token late (that *of* token s, as some
engines store it); earlier, and it shifts the other way or looks ahead. It works for any
teacher, an untrained one too, and needs no labels (docs/math.md, "How a shift is found").

The same row scored twice says how far the engine disagrees with itself: the probe's noise.
Promises: a verdict, never an exception over what it saw. Pure; whoever runs the engine asks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from teacher_logits.selection import Selection

# A position has moved when it differs by more than this, and by more than so many times the
# engine's own noise.
LEAST_CHANGE = 1e-3
NOISE_FACTOR = 10.0


class Verdict(enum.Enum):
    """What one probe shows, the worst last."""

    OK = "ok"
    UNMOVED = "unmoved"
    LATE = "late"
    EARLY = "early"
    LEAKS = "leaks"


_MEANINGS = {
    Verdict.OK: "as it should be",
    Verdict.UNMOVED: "nothing moved: the teacher ignores this token, or its noise hides it",
    Verdict.LATE: "each distribution is served {gap} token(s) late",
    Verdict.EARLY: "each distribution is served {gap} token(s) early, or the teacher looks ahead",
    Verdict.LEAKS: "the change reaches into the next document of the row",
}


@dataclass(frozen=True, kw_only=True)
class CausalityProbe:
    """One probe's outcome: token ``position`` was changed, ``first_changed`` is what moved first.

    ``first_changed`` is None where nothing moved. ``noise`` is the largest difference of two
    identical runs, ``threshold`` the difference from which a position counts as moved.
    """

    verdict: Verdict
    position: int
    first_changed: int | None
    noise: float
    threshold: float

    def __str__(self) -> str:
        moved = "none" if self.first_changed is None else f"position {self.first_changed}"
        gap = 0 if self.first_changed is None else abs(self.first_changed - self.position)
        return (
            f"{self.verdict.value}: token {self.position} was changed and the first to move is "
            f"{moved} (threshold {self.threshold:.2g}, noise {self.noise:.2g}); "
            + _MEANINGS[self.verdict].format(gap=gap)
        )


def causality_verdict(
    base: torch.Tensor,
    repeat: torch.Tensor,
    changed: torch.Tensor,
    *,
    position: int,
    document_end: int | None = None,
) -> CausalityProbe:
    """Judge one probe from signatures [S] or [S,F]: numbers that tell a position's scores.

    ``base`` and ``repeat`` are two runs of one row, ``changed`` a run with the token at
    ``position`` changed. ``document_end`` is the first position of the next document in a
    packed row, and nothing from there on may move.

    Raises:
        PayloadInvalidError: the three do not have one shape, or ``position`` is not in it.
    """
    shapes = [tuple(t.shape) for t in (base, repeat, changed)]
    if len(set(shapes)) > 1 or not 0 <= position < len(base):
        raise PayloadInvalidError(
            f"probe signatures have shapes {shapes} and token {position} was changed; all three "
            "have one shape, whose first axis holds that token",
            facts={"shapes": str(shapes), "position": position},
        )
    noise = _distances(base, repeat).amax().item()
    threshold = max(LEAST_CHANGE, NOISE_FACTOR * noise)
    moved = (_distances(base, changed) > threshold).nonzero().flatten().tolist()
    first = moved[0] if moved else None
    if document_end is not None and moved and moved[-1] >= document_end:
        verdict = Verdict.LEAKS
    elif first is None:
        verdict = Verdict.UNMOVED
    elif first == position:
        verdict = Verdict.OK
    else:
        verdict = Verdict.LATE if first > position else Verdict.EARLY
    return CausalityProbe(
        verdict=verdict, position=position, first_changed=first, noise=noise, threshold=threshold
    )


def worst(probes: Iterable[CausalityProbe]) -> CausalityProbe:
    """Return the probe with the worst verdict, the first of equals. There must be one."""
    order = list(Verdict)
    return max(probes, key=lambda probe: order.index(probe.verdict))


def signature(selection: Selection) -> torch.Tensor:
    """Return what a probe compares of a selection, fp32 [P,K+1]: its numbers, not its ids.

    Ids may swap places among near-equal values from run to run; their values may not.
    """
    return torch.cat([selection.topk_logprobs.float(), selection.logsumexp[:, :1]], 1)


def _distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the largest difference at each position [S]; equal infinities do not differ."""
    difference = torch.where(a == b, 0.0, (a.double() - b.double()).abs())
    return torch.nan_to_num(difference, nan=torch.inf).reshape(len(a), -1).amax(1)
