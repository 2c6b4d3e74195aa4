"""Parity: are the numbers that the service hands out those that somebody computed elsewhere?

    parity = tl.compare_with_reference(payload.targets, my_logits, next_ids=next_ids)
    assert parity.holds, parity.cause

The guards of a payload see whether its scores belong to its tokens; that the teacher itself is
at fault (another model, logits that are one position off, a temperature that was applied
already) they cannot see, for it agrees with itself. A second opinion can.

Promises: log-probabilities are compared at the very ids that were handed out, and nothing is
changed. Entries and tail sum to one, so that tails need no comparison of their own. Where the
numbers differ, two causes are tried: positions that are shifted within their row, and another
temperature; one is named where it leaves less than a quarter of the mean difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.config import DEFAULT_TOLERANCE_NATS
from teacher_logits_client.parity.lookup import DenseReference, EntryReference, check_width

if TYPE_CHECKING:
    from teacher_logits_client.parity.lookup import Reference
    from teacher_logits_client.targets import Targets

_SHIFTS = (1, -1, 2, -2)
_EXPLAINS = 0.25
"""A cause is named where it leaves less than this share of the mean difference."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One entry: row, position in its row, id, and its two log-probabilities in nats."""

    row: int
    position: int
    token_id: int
    served: float
    reference: float


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far what was handed out lies from a reference. Differences are in nats.

    ``positions`` and ``entries`` were compared; ``differing_positions`` have an entry that is
    further off than ``tolerance``, ``first_difference`` is the first of them (None without one),
    and ``worst`` the entry that is furthest off. ``shared_ids`` is the share, 0 to 1, of the
    ``top_k`` ids of a position that are among the reference's own first ``reference_ids``.
    ``shift`` d: each position has what the reference says d positions on in its row (-1: the
    service is one token late). ``temperature``: what the reference gives at this one. Both None
    where they explain nothing. ``served_loss`` and ``reference_loss`` are the means of
    -log p of the token that comes next, None where that is not known.
    """

    positions: int
    entries: int
    differing_positions: int
    max_abs_diff: float
    mean_abs_diff: float
    tolerance: float
    first_difference: Place | None
    worst: Place
    shared_ids: float
    top_k: int
    reference_ids: int
    shift: int | None
    temperature: float | None
    served_loss: float | None
    reference_loss: float | None

    @property
    def holds(self) -> bool:
        """Whether no entry is further off than the tolerance."""
        return self.differing_positions == 0

    @property
    def cause(self) -> str:
        """What explains the difference, in a sentence; empty where there is none."""
        if self.holds:
            return ""
        if self.shift is not None:
            count, is_late = abs(self.shift), self.shift < 0
            tokens = f"{count} token{'' if count == 1 else 's'} {'late' if is_late else 'early'}"
            place = f"position s {'-' if is_late else '+'} {count}"
            return (
                f"the service is {tokens}: at position s it has what the reference says at {place} "
                "of the row; mend the side that shifts: logits at position s are of token s + 1"
            )
        if self.temperature is not None:
            return (
                f"the service has what the reference gives at temperature {self.temperature:.3g}: "
                "one side divides its logits before it hands them on"
            )
        return (
            "neither a shift of 1 or 2 tokens nor another temperature explains it: compare "
            "weights, revision, adapters, arithmetic type and the rows' first tokens"
        )


def compare_with_reference(
    targets: Targets,
    reference: torch.Tensor | Reference,
    *,
    next_ids: torch.Tensor | None = None,
    vocabulary_size: int | None = None,
    tolerance: float = DEFAULT_TOLERANCE_NATS,
) -> Parity:
    """Hold targets against logits, or log-probabilities, that were computed elsewhere.

    ``reference`` is [P,V] at the positions of the targets, or [N,S,V] in whole rows, padded on
    the right, raw or normalised at temperature 1; it is taken at the targets' temperature. Or an
    ``EntryReference``, of some ids alone. Columns from ``vocabulary_size`` on are left out, as
    the service leaves out what pads a head (``session.teacher.vocabulary_size``). ``next_ids``
    [P], -1 where none comes next, has the losses compared too (at temperature 1, where targets
    have ``actual_logprob``). ``tolerance`` in nats is how far off an entry may be: the default
    suits bf16, and 0.01 is fair where both compute in fp32.

    Raises:
        PayloadInvalidError: shapes that do not fit, an id that the reference has no column for,
            a NaN in it, sampled targets, or nothing that could be compared.
        LeaseLostError: the targets' lease is closed.
    """
    _check_comparable(targets)
    if isinstance(reference, torch.Tensor):
        reference = _dense(reference, targets, vocabulary_size)
    view = _View.of(targets, reference)
    diff = view.diff(0)
    seen = ~diff.isnan()
    if not bool(seen.any()):
        raise PayloadInvalidError(
            f"none of the {diff.numel()} entries handed out is in the reference: nothing to "
            "compare",
            facts={"entries": diff.numel(), "positions": len(diff)},
        )
    off, mean = (diff > tolerance).any(1), float(diff[seen].mean())
    differs = bool(off.any())
    served_loss, reference_loss = _losses(targets, view.reference, next_ids)
    return Parity(
        positions=int(seen.any(1).sum()),
        entries=int(seen.sum()),
        differing_positions=int(off.sum()),
        max_abs_diff=float(diff[seen].max()),
        mean_abs_diff=mean,
        tolerance=tolerance,
        first_difference=view.place(diff, int(off.nonzero()[0])) if differs else None,
        worst=view.place(diff, int(diff.nan_to_num(-1.0).amax(1).argmax())),
        shared_ids=view.shared_ids(),
        top_k=diff.shape[1],
        reference_ids=view.reference.first_ids(diff.shape[1]),
        shift=view.shift(mean) if differs else None,
        temperature=view.temperature(targets.temperature) if differs else None,
        served_loss=served_loss,
        reference_loss=reference_loss,
    )


def _check_comparable(targets: Targets) -> None:
    targets.check_open()
    if targets.sampled:
        raise PayloadInvalidError(
            "the targets are a sample, whose weights are no log-probabilities: compare those of a "
            "session without selection=Sampled(...)",
            facts={"selection": "sampled"},
        )


class _View:
    """What was handed out, ids and log-probabilities [P,K], beside its reference."""

    def __init__(
        self,
        ids: torch.Tensor,
        served: torch.Tensor,
        reference: Reference,
        row_offsets: torch.Tensor,
    ) -> None:
        self.reference = reference
        self._ids, self._served, self._offsets = ids, served, row_offsets
        self._places = torch.arange(len(ids))
        self._rows = torch.arange(len(row_offsets) - 1).repeat_interleave(row_offsets.diff())

    @classmethod
    def of(cls, targets: Targets, reference: Reference) -> _View:
        ids = targets.topk_ids.reshape(-1, targets.topk_ids.shape[-1]).long().cpu()
        served = targets.topk_logprobs.reshape(ids.shape).float().cpu()
        if isinstance(reference, EntryReference) and targets.temperature != 1.0:
            raise PayloadInvalidError(
                f"a reference of some ids alone is at temperature 1, and the targets are at "
                f"{targets.temperature:g}: compare payload.targets",
                facts={"temperature": targets.temperature},
            )
        if reference.positions != len(ids):
            raise PayloadInvalidError(
                f"the reference has {reference.positions} positions and the targets have "
                f"{len(ids)}: give [P,V] at these positions, or [N,S,V] with a row for each row",
                facts={"reference_positions": reference.positions, "positions": len(ids)},
            )
        return cls(ids, served, reference, targets.row_offsets.cpu())

    def shared_ids(self) -> float:
        """Return the share of the ids that are among the reference's own first."""
        return float(self.reference.shared(self._ids)[self._ids >= 0].float().mean())

    def diff(self, shift: int) -> torch.Tensor:
        """Return |served - reference| [P,K], ``shift`` positions on; NaN where one is not there."""
        places = (self._places + shift).clamp(0, len(self._places) - 1)
        here = (places == self._places + shift) & (self._rows[places] == self._rows)
        away = (self._served - self.reference.at(self._ids, places)).abs()
        return away.masked_fill(~here.unsqueeze(1), torch.nan)

    def place(self, diff: torch.Tensor, position: int) -> Place:
        """Return the entry of a position that is furthest off."""
        column = int(diff[position].nan_to_num(-1.0).argmax())
        row = int(self._rows[position])
        at = torch.tensor([position])
        return Place(
            row=row,
            position=position - int(self._offsets[row]),
            token_id=int(self._ids[position, column]),
            served=float(self._served[position, column]),
            reference=float(self.reference.at(self._ids[at], at)[0, column]),
        )

    def shift(self, mean: float) -> int | None:
        """Return the shift that leaves least of the mean difference, if it explains that."""
        left = {shift: float(self.diff(shift).nanmean()) for shift in _SHIFTS}
        best = min(_SHIFTS, key=lambda shift: left[shift] if left[shift] >= 0 else torch.inf)
        return best if left[best] < _EXPLAINS * mean else None

    def temperature(self, own: float) -> float | None:
        """Return the temperature at which the reference agrees, if there is one.

        Within a position log-probabilities at T are those at 1, divided by T, but for a number.
        """
        reference = self.reference.at(self._ids, self._places)
        seen = ~reference.isnan()
        counts = seen.sum(1, keepdim=True).clamp_min(1)
        pair = []
        for values in (reference, self._served):
            kept = torch.where(seen, values, 0.0)
            pair.append(torch.where(seen, kept - kept.sum(1, keepdim=True) / counts, 0.0))
        theirs, ours = pair
        slope = float((theirs * ours).sum() / theirs.square().sum().clamp_min(1e-12))
        left = float((ours - slope * theirs).abs().sum())
        to_explain = min(float(ours.abs().sum()), float((ours - theirs).abs().sum()))
        if slope <= 0 or left >= _EXPLAINS * to_explain:
            return None
        return own / slope


def _dense(given: torch.Tensor, targets: Targets, vocabulary_size: int | None) -> DenseReference:
    check_width(given, vocabulary_size)
    given = given[..., :vocabulary_size]
    if given.dim() == 3:
        counts = targets.row_offsets.diff().tolist()
        firsts = [0] * len(counts) if targets.row_firsts is None else targets.row_firsts.tolist()
        fits = len(given) == len(counts) and all(
            first + count <= given.shape[1] for first, count in zip(firsts, counts, strict=True)
        )
        if fits:
            rows = zip(given, firsts, counts, strict=True)
            given = torch.cat([row[first : first + count] for row, first, count in rows])
    if given.dim() != 2:
        raise PayloadInvalidError(
            f"the reference has shape {tuple(given.shape)}: give [P,V] at the positions of the "
            "targets, or [N,S,V] with a whole row for each row",
            facts={"shape": str(tuple(given.shape))},
        )
    return DenseReference(given.detach().cpu(), temperature=targets.temperature)


def _losses(
    targets: Targets, reference: Reference, next_ids: torch.Tensor | None
) -> tuple[float | None, float | None]:
    """Return the mean -log p of the next token on both sides, where both know it."""
    if next_ids is None or targets.actual_logprob is None or targets.temperature != 1.0:
        return None, None
    wanted = next_ids.reshape(-1, 1).long().cpu()
    if len(wanted) != reference.positions:
        raise PayloadInvalidError(
            f"{len(wanted)} next ids are given for {reference.positions} positions",
            facts={"next_ids": len(wanted), "positions": reference.positions},
        )
    theirs = reference.at(wanted, torch.arange(len(wanted))).squeeze(1)
    ours = targets.actual_logprob.reshape(-1).float().cpu()
    both = targets.valid.reshape(-1).cpu() & ~theirs.isnan()
    if not bool(both.any()):
        return None, None
    return -float(ours[both].mean()), -float(theirs[both].mean())
