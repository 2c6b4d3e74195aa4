"""Targets: a payload as the student's loss takes it.

A payload's values come over the wire in 16 bits and at temperature 1; ``make_targets`` takes
them to the temperature wanted and renormalises entries and tail jointly, so that every position
sums to one and no divergence can come out negative (docs/math.md, "What an encoding may cost").

Promises: every number is finite. What a payload writes as -inf is ``ABSENT_LOGPROB`` here, low
enough that its probability is exactly 0 and high enough that 0 times it is 0 and not NaN: it
stands for an entry that does not exist (id -1), and for a tail with nothing in it. A position
of a row that the teacher could not score has no entries and all its mass in the tail, so that
even a loss that forgets ``valid`` learns nothing from it.

Refuses a NaN, and a temperature that the payload does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import TYPE_CHECKING

import torch

from teacher_logits.codec import renormalise, retemper
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind
from teacher_logits_client.targets.entries import Entries
from teacher_logits_client.targets.valid_positions import (
    Origin,
    firsts_of,
    refuse_faults,
    valid_and_scored,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from teacher_logits.error_bounds import ErrorBound

ABSENT_LOGPROB = -1e4
"""Log-probability of what is not there. Its exponential is 0 in every element type."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Targets:
    """What the teacher says about P positions of N rows, on the device of its columns.

    ``topk_ids`` int32 [P,K], -1 where an entry is absent; ``topk_logprobs`` fp32 [P,K] and
    ``log_tail`` fp32 [P], normalised jointly at ``temperature``; ``actual_logprob`` fp32 [P] of
    the token that really comes next, always at temperature 1 (None where it was not asked for);
    ``valid`` bool [P], the positions to learn from; ``row_offsets`` int64 [N+1], where each
    row's positions start; ``row_firsts`` int64 [N], which position of its row is the first of
    them (None where that is 0 for each). ``topk_ids`` may be a view of the payload, the rest is
    never one. Those of a lease end with it; ``clone`` gives some that do not.
    The entries are the K best, or ids that the client chose, in its order; or, where ``sampled``,
    a sample, with the logs of its unbiased weights and nothing in the tail, which only losses that
    are linear in them take. ``entropy`` fp32 [P] is then the whole distribution's.
    """

    topk_ids: torch.Tensor
    topk_logprobs: torch.Tensor
    log_tail: torch.Tensor
    actual_logprob: torch.Tensor | None
    valid: torch.Tensor
    temperature: float
    row_offsets: torch.Tensor
    row_firsts: torch.Tensor | None = None
    sampled: bool = False
    entropy: torch.Tensor | None = None

    def __repr__(self) -> str:
        """Shapes, and not a number of the tensors."""
        shapes = (
            f"{each.name} {list(value.shape)}"
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), torch.Tensor)
        )
        where = f"temperature {self.temperature:g}, {self.topk_ids.device}"
        return f"<{type(self).__name__} {', '.join(shapes)}, {where}>"

    @property
    def present(self) -> torch.Tensor:
        """Bool, of the shape of ``topk_ids``: the entries that exist."""
        return self.topk_ids >= 0

    def check_open(self) -> None:
        """Let targets pass that may be read; these always may, those of a lease while it is open.

        Raises:
            LeaseLostError: they are of a lease that is closed (``LeasedTargets``).
        """

    def clone(self) -> Targets:
        """Return a copy of everything, on the same device, which outlives any lease.

        It may be pickled, as what a data loader's worker returns.

        Raises:
            LeaseLostError: see ``check_open``.
        """
        return self._changed(lambda tensor: tensor.detach().clone())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Targets:
        """Return a copy on another device, or on the same: like ``clone``, it outlives any lease.

        ``non_blocking`` as for ``torch.Tensor.to``: the lease has to stay open until the copy is
        complete.

        Raises:
            LeaseLostError: see ``check_open``.
        """
        return self._changed(
            lambda tensor: tensor.detach().to(device, non_blocking=non_blocking, copy=True)
        )

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Targets:
        self.check_open()
        values = {each.name: getattr(self, each.name) for each in fields(Targets)}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                values[name] = change(value)
        return Targets(**values)

    def rectangular(self) -> Targets:
        """Return views as [N,S,K] and [N,S], for rows of equal length S. Nothing is copied.

        Raises:
            PayloadInvalidError: the rows differ in length, with the first that does.
            LeaseLostError: see ``check_open``.
        """
        self.check_open()
        lengths = self.row_offsets.diff()
        different = (lengths != lengths[:1]).nonzero()
        if len(lengths) == 0 or len(different):
            row = int(different[0]) if len(different) else 0
            first = int(lengths[0]) if len(lengths) else 0
            length = int(lengths[row]) if len(lengths) else 0
            raise PayloadInvalidError(
                f"row {row} of {len(lengths)} has {length} positions and row 0 has {first}; only "
                "rows of equal length have a rectangular view: use the flat targets, with row "
                "offsets",
                facts={"row": row, "positions": length, "row_0_positions": first},
            )
        shape = (len(lengths), int(lengths[0]))
        actual, entropy = self.actual_logprob, self.entropy
        return replace(
            self,
            topk_ids=self.topk_ids.view(*shape, self.topk_ids.shape[-1]),
            topk_logprobs=self.topk_logprobs.view(*shape, self.topk_logprobs.shape[-1]),
            log_tail=self.log_tail.view(shape),
            actual_logprob=None if actual is None else actual.view(shape),
            valid=self.valid.view(shape),
            entropy=None if entropy is None else entropy.view(shape),
        )


def make_targets(
    columns: Mapping[ColumnKind, torch.Tensor],
    *,
    temperature: float = 1.0,
    temperatures: Sequence[float] = (1.0,),
    lengths: torch.Tensor | None = None,
    bound: ErrorBound | None = None,
    vocab_size: int | None = None,
) -> Targets:
    """Make targets from a payload's columns, at one of its ``temperatures``.

    ``columns`` has ``topk_ids``, ``topk_logprobs``, ``log_tail`` and ``row_offsets``,
    ``logsumexp`` as well for a temperature other than 1, and what else was asked for. They are
    only read. ``temperatures`` are those of the columns of ``log_tail`` and ``logsumexp``.

    A position is valid where ``row_status`` says that its row is OK. With ``lengths`` [N], the
    true number of tokens of each row, a row's last position is not valid, since nothing comes
    next there; where only some positions were asked for, ``row_windows`` must be there too.
    It also says where rows start, for a loss over logits of whole rows. Entries that are sampled
    or a client's choice stand under names of their own; see ``entries``. With ``bound``, what the
    codec that they came in may have moved log-probabilities by, they are held against what a
    teacher gives (docs/math.md, "Invariants of a payload"): positions sum to one, and the K best
    are distinct ids below ``vocab_size`` in falling order.

    Raises:
        PayloadInvalidError: a column is missing, the temperature is not among ``temperatures``,
            or a scored position holds a NaN or +inf, or is not what a teacher gives.
    """
    columns = entries = Entries(columns)
    ids = _column(columns, ColumnKind.TOPK_IDS)
    logprobs, log_tail = _at_temperature(columns, temperature, temperatures)
    logprobs, log_tail = renormalise(logprobs, log_tail)
    offsets = _column(columns, ColumnKind.ROW_OFFSETS).to(ids.device, copy=True)
    actual = columns.get(ColumnKind.ACTUAL_LOGPROB)
    firsts = firsts_of(columns, offsets)
    valid, scored = valid_and_scored(columns, offsets, firsts, lengths)
    used = {0: 1.0, list(temperatures).index(temperature): temperature}
    origin = Origin(
        bound=bound, vocab_size=vocab_size, temperatures=used, are_best=not entries.is_renamed
    )
    refuse_faults(columns, scored, logprobs=logprobs, log_tail=log_tail, origin=origin)
    if not bool(scored.all()):
        # Rows that the teacher could not score: no entries, and all the mass in the tail.
        ids = ids.masked_fill(~scored.unsqueeze(1), -1)
        logprobs.masked_fill_(~scored.unsqueeze(1), ABSENT_LOGPROB)
        log_tail.masked_fill_(~scored, 0.0)
        actual = None if actual is None else actual.masked_fill(~scored, 0.0)
    return Targets(
        topk_ids=ids,
        topk_logprobs=logprobs.masked_fill_(ids < 0, ABSENT_LOGPROB).clamp_min_(ABSENT_LOGPROB),
        log_tail=log_tail.clamp_min_(ABSENT_LOGPROB),
        actual_logprob=None if actual is None else actual.float().clamp_min(ABSENT_LOGPROB),
        valid=valid,
        temperature=temperature,
        row_offsets=offsets,
        row_firsts=firsts,
        sampled=entries.is_sample,
        entropy=columns[ColumnKind.ENTROPY].clone() if entries.is_sample else None,
    )


def check_temperature(temperature: object) -> None:
    """Let a number pass.

    Raises:
        PayloadInvalidError: it is none.
    """
    if not isinstance(temperature, Real):
        raise PayloadInvalidError(
            f"the temperature is {temperature!r}, a {type(temperature).__name__}: give a number, "
            "such as targets_at(2.0)",
            facts={"given": type(temperature).__name__},
        )


def _at_temperature(
    columns: Mapping[ColumnKind, torch.Tensor], temperature: float, temperatures: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [P,K] and tail [P] at a temperature of the payload."""
    check_temperature(temperature)
    if temperature not in temperatures:
        has = ", ".join(f"{t:g}" for t in temperatures)
        raise PayloadInvalidError(
            f"the payload has no temperature {temperature:g}; it has {has}: name it when the "
            f"session is opened, StudentProfile(temperatures=({temperature:g},))",
            facts={"temperature": temperature, "temperatures": has},
        )
    column = list(temperatures).index(temperature)
    logprobs = _column(columns, ColumnKind.TOPK_LOGPROBS)
    log_tail = _column(columns, ColumnKind.LOG_TAIL)[:, column]
    if column > 0:
        normalisers = _column(columns, ColumnKind.LOGSUMEXP)
        logprobs = retemper(logprobs, normalisers[:, 0], normalisers[:, column], temperature)
    return logprobs, log_tail


def _column(columns: Mapping[ColumnKind, torch.Tensor], kind: ColumnKind) -> torch.Tensor:
    if kind in columns:
        return columns[kind]
    has = ", ".join(k.value for k in columns)
    raise PayloadInvalidError(
        f"targets need the column {kind.value}, and the payload has {has}: ask for it when the "
        "session is opened",
        facts={"column": kind.value, "columns": has},
    )
