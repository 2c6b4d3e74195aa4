"""Entry invariants: what must hold of entries that are not the K best, but a sample or chosen ids.

``invariants`` runs these by row and position. Sampled weights sum to one whatever was drawn, and
the log-probabilities of chosen ids sum to one with the mass outside them: either catches a wrong
normaliser, rows paired wrongly and most corruption (docs/math.md, "Invariants of a payload").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from teacher_logits.codec import log_total, normalisation_tolerance, retemper
from teacher_logits.codec.value_codecs import mass_error
from teacher_logits.error_bounds import EXACT, ErrorBound
from teacher_logits.layout import ColumnKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Rules = Iterator[tuple[str, torch.Tensor]]

_TOLERANCE = 1e-5
"""Of sums and logarithms that were computed in fp64 and travel as fp32."""
TWICE = "an id that stands there twice"
_ROUNDINGS = 2.0**-22
"""What a normaliser, rounded to fp32 and added to there, may be off by, relative to its size."""


def sampled_rules(columns: Mapping[ColumnKind, torch.Tensor], vocab_size: int) -> Rules:
    """Yield each rule of sampled entries and where it is broken, bool [P]."""
    ids, weights = columns[ColumnKind.SAMPLED_IDS], columns[ColumnKind.SAMPLED_WEIGHTS].float()
    yield from _id_rules(ids, vocab_size)
    # NaN fails every comparison, so each rule says what must hold.
    yield "a weight that is NaN, below 0 or above 1", ~((weights >= 0) & (weights <= 1)).all(1)
    yield "a weight without an id", ((ids < 0) & (weights != 0)).any(1)
    total = weights.double().sum(1)
    yield "weights that do not sum to one", ~((total - 1).abs() <= _TOLERANCE)
    if ColumnKind.ENTROPY in columns:
        entropy = columns[ColumnKind.ENTROPY]
        most = math.log(vocab_size) + _TOLERANCE * max(1.0, math.log(vocab_size))
        yield (
            f"an entropy outside 0 to that of {vocab_size} equals",
            ~((entropy >= 0) & (entropy <= most)),
        )
    yield from _actual_rule(columns)


def given_rules(
    columns: Mapping[ColumnKind, torch.Tensor], vocab_size: int, temperatures: Sequence[float]
) -> Rules:
    """Yield each rule of client-chosen entries and where it is broken, bool [P]."""
    ids, values = columns[ColumnKind.SCORED_IDS], columns[ColumnKind.SCORED_LOGPROBS]
    tails = columns[ColumnKind.LOG_TAIL]
    yield from _id_rules(ids, vocab_size)
    tolerance = normalisation_tolerance(values, tails[:, 0])
    yield "a log-probability that is NaN or above 0", ~(values.amax(1) <= tolerance)
    yield "a log_tail that is NaN or above 0", ~(tails.amax(1) <= tolerance)
    yield "a log-probability without an id", ((ids < 0) & (values != -torch.inf)).any(1)
    for column, temperature in enumerate(temperatures):
        yield from sums_to_one(columns, values, column, temperature, EXACT)
    yield from _actual_rule(columns)


def any_of(marks: torch.Tensor) -> torch.Tensor:
    """Return which positions [P] have a mark [P,K]; quick where none has, as is usual."""
    return marks.any(1) if bool(marks.any()) else marks.new_zeros(len(marks))


def stands_twice(ids: torch.Tensor) -> torch.Tensor:
    """Return bool [P]: the positions of which some id [P,K] stands there more than once."""
    ordered = in_order(ids)
    same = ordered[:, 1:] == ordered[:, :-1]
    if not bool(same.any()):  # as is usual
        return same.new_zeros(len(same))
    return (same & (ordered[:, 1:] >= 0)).any(1)


def in_order(ids: torch.Tensor) -> torch.Tensor:
    """Return ids [P,K] with each position's in rising order.

    On the host by NumPy, where torch has it: that keeps no account of where each came from, and is
    some twenty times as quick.
    """
    if ids.device.type == "cpu":
        ordered = ids.clone(memory_format=torch.contiguous_format)
        if _sort_by_numpy(ordered):
            return ordered
    return ids.sort(1).values


def _sort_by_numpy(ids: torch.Tensor) -> bool:
    """Sort each position's ids in place; False where torch has no NumPy."""
    try:
        array = ids.numpy()
    except RuntimeError:
        return False
    array.sort(axis=1)
    return True


def sums_to_one(
    columns: Mapping[ColumnKind, torch.Tensor],
    stored: torch.Tensor,
    column: int,
    temperature: float,
    bound: ErrorBound,
) -> Rules:
    """Yield the rules of one temperature, that of a column of ``log_tail`` and ``logsumexp``."""
    tails, normalisers = columns[ColumnKind.LOG_TAIL], columns.get(ColumnKind.LOGSUMEXP)
    values, large = stored, None
    if normalisers is not None:
        yield "a logsumexp that is not finite", ~normalisers[:, column].isfinite()
        if column > 0:
            at_1, at_tau = normalisers[:, 0], normalisers[:, column]
            values = retemper(stored, at_1, at_tau, temperature)
            large = at_1.abs() / temperature + at_tau.abs()
    elif column > 0:
        return
    off = mass_is_off(
        stored, values, tails[:, column], temperature=temperature, bound=bound, large=large
    )
    yield f"entries and tail that do not sum to one at temperature {temperature:g}", off


def mass_is_off(
    stored: torch.Tensor,
    values: torch.Tensor,
    log_tail: torch.Tensor,
    *,
    temperature: float,
    bound: ErrorBound,
    large: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which of ``values`` [P,K] and ``log_tail`` [P] do not sum to one, bool [P].

    ``values`` are what is ``stored`` [P,K] at a temperature. ``large`` [P] sums the sizes of the
    numbers that they are differences of, of which fp32 keeps so many digits and no more.
    """
    tolerance = normalisation_tolerance(stored, log_tail) * max(1.0, 1.0 / temperature)
    if large is not None:
        tolerance = tolerance + _ROUNDINGS * large
    if not bound.is_exact:
        tolerance = tolerance + mass_error(stored, values.float().exp(), bound) / temperature
    return ~(log_total(values, log_tail).abs() <= tolerance)


def _id_rules(ids: torch.Tensor, vocab_size: int) -> Rules:
    yield (
        f"an id outside the vocabulary of {vocab_size}",
        (ids.amax(1) >= vocab_size) | (ids.amin(1) < -1),
    )
    yield TWICE, stands_twice(ids)


def _actual_rule(columns: Mapping[ColumnKind, torch.Tensor]) -> Rules:
    actual = columns.get(ColumnKind.ACTUAL_LOGPROB)
    if actual is not None:
        yield "an actual_logprob that is NaN or above 0", ~(actual <= _TOLERANCE)
