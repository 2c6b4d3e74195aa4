"""Selection: what a teacher's logits become; the K best entries of each position and the rest.

    logits [P,V]  ->  ids, log-probabilities [P,K]; log_tail, logsumexp [P,T]; actual_logprob [P]

Promises: ids in the order value descending, then id ascending, however many values tie;
log-probabilities over the whole vocabulary; tails summed over the complement, so that one of
1e-12 is as exact as one of 0.5; the same bits for a position whatever others come with it (on
a CPU); no second array of the size of the logits, which are only read.

Refuses sizes, temperatures and ids that make no sense. A position with NaN or +inf, or without
a finite logit, is never renormalised around: its ``status`` says so and the rest of it is
canonical (ids -1, every float 0), so that equal payloads have equal bytes.

Formulas: docs/math.md, "Top-k and its normaliser" and docs/math.md, "Temperature". The odd cases:
docs/math.md, "Padding, ties and what is not finite".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, overload

import torch

from teacher_logits.layout import RowStatus
from teacher_logits.selection.checks import (
    check_k_given,
    check_logits,
    check_next_ids,
    check_out,
    check_settings,
    check_takes,
)
from teacher_logits.selection.complement import complement_sums, row_sums
from teacher_logits.selection.ranking import rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Logits ranked in one go: buffers of about a tenth of that, and few calls of small kernels.
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 23, 1 << 27


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """What is kept of P positions: K entries each, and T temperatures of which the first is 1.

    ``topk_ids`` int32 [P,K] and ``topk_logprobs`` [P,K] (fp32, or what the caller's own tensor
    has) in order; -1 and -inf where fewer than K entries are finite. ``log_tail`` and
    ``logsumexp`` fp32 [P,T]: the log of the mass outside the K ids (-inf where none is), and
    the normaliser. ``actual_logprob`` fp32 [P], or None where no next ids were given.
    ``status`` uint8 [P], by ``RowStatus``. ``topk_logits`` fp32 or bf16 [P,K] are the raw logits
    of the ids, for who has a tensor for them; -inf where there is no id.
    """

    topk_ids: torch.Tensor
    topk_logprobs: torch.Tensor
    log_tail: torch.Tensor
    logsumexp: torch.Tensor
    actual_logprob: torch.Tensor | None
    status: torch.Tensor
    topk_logits: torch.Tensor | None = None

    def __getitem__(self, positions: slice) -> Selection:
        """Return views of some of the positions."""
        actual, logits = self.actual_logprob, self.topk_logits
        return Selection(
            topk_ids=self.topk_ids[positions],
            topk_logprobs=self.topk_logprobs[positions],
            log_tail=self.log_tail[positions],
            logsumexp=self.logsumexp[positions],
            actual_logprob=None if actual is None else actual[positions],
            status=self.status[positions],
            topk_logits=None if logits is None else logits[positions],
        )

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """The tensors that a payload has, by name; what a publisher's ``draft.write`` takes."""
        found = {name: tensor for name, tensor in vars(self).items() if name != "status"}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def blank(self) -> None:
        """Make all positions what those of a bad row are: ids -1, every float 0.

        Their ``status`` stays.
        """
        self.topk_ids.fill_(-1)
        floats = (self.topk_logprobs, self.topk_logits, self.log_tail, self.logsumexp)
        for numbers in (*floats, self.actual_logprob):
            if numbers is not None:
                numbers.zero_()


class TakesSelection(Protocol):
    """What takes a selection and knows what is to be kept of it, such as a publisher's draft."""

    def select(
        self,
        logits: torch.Tensor,
        *,
        k: int | None,
        temperatures: Sequence[float] | None,
        vocab_size: int | None,
        next_ids: torch.Tensor | None,
    ) -> Selection:
        """Select from logits into itself. What is None is its own to say; see ``select_top_k``.

        Raises:
            PayloadInvalidError: something is given that is not what it takes.
        """


@overload
def select_top_k(
    logits: torch.Tensor,
    *,
    k: int,
    temperatures: Sequence[float] = ...,
    vocab_size: int | None = ...,
    next_ids: torch.Tensor | None = ...,
    out: Selection | None = ...,
) -> Selection: ...


@overload
def select_top_k(
    logits: torch.Tensor,
    *,
    k: int | None = ...,
    temperatures: Sequence[float] | None = ...,
    vocab_size: int | None = ...,
    next_ids: torch.Tensor | None = ...,
    out: TakesSelection,
) -> Selection: ...


def select_top_k(
    logits: torch.Tensor,
    *,
    k: int | None = None,
    temperatures: Sequence[float] | None = None,
    vocab_size: int | None = None,
    next_ids: torch.Tensor | None = None,
    out: Selection | TakesSelection | None = None,
) -> Selection:
    """Select the ``k`` best entries of every position of ``logits`` [P,V] or [N,S,V].

    Logits are fp32, bf16 or fp16 and stay as they are; the arithmetic is fp32. Columns from
    ``vocab_size`` on are padding: never selected and in no sum, whatever they hold. ``k`` may
    exceed the vocabulary; what is not there is -1 and -inf. ``temperatures`` starts with 1.0,
    which it is where not given, and names at most 4 more. ``next_ids`` [P] or [N,S] is the token
    that really comes next, -1 where none does: its ``actual_logprob`` is then 0. ``out`` takes
    the result: tensors of these shapes, such as views of a slab, which stay the caller's; its
    ``topk_logprobs`` may be fp32, bf16 or fp16, and it may have ``topk_logits``. A publisher's
    draft as ``out`` knows all the others by itself.

    Raises:
        PayloadInvalidError: with the number that is wrong, the rule and what to give instead.
    """
    if out is not None and not isinstance(out, Selection):
        check_takes(out)
        return out.select(
            logits, k=k, temperatures=temperatures, vocab_size=vocab_size, next_ids=next_ids
        )
    k = check_k_given(k)
    temperatures = (1.0,) if temperatures is None else temperatures
    width = check_logits(logits, vocab_size)
    check_settings(k, temperatures)
    following = None if next_ids is None else check_next_ids(next_ids, logits, width)
    device = logits.device if out is None else torch.device("meta")
    wanted = _allocate(logits, k, len(temperatures), following is not None, device)
    if out is None:
        out = wanted
    else:
        if out.topk_logits is not None:
            wanted = replace(wanted, topk_logits=torch.empty_like(wanted.topk_logprobs))
        check_out(vars(out), vars(wanted))
    start = 0
    with torch.no_grad():
        for rows in pieces(logits, width):
            part = slice(start, start + len(rows))
            _select(rows, temperatures, None if following is None else following[part], out[part])
            start = part.stop
    return out


def row_statuses(status: torch.Tensor, row_offsets: torch.Tensor) -> torch.Tensor:
    """Return uint8 [N]: of each row's positions the worst ``status`` [P]; NaN wins, OK is rest.

    ``row_offsets`` int64 [N+1] says which positions are whose. A row without positions is OK.
    """
    lengths = row_offsets.diff()
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    ranked = torch.where(status == RowStatus.OK, 255, status.long())  # the smaller, the worse
    worst = torch.full((len(lengths),), 255, device=status.device)
    worst.scatter_reduce_(0, rows.to(status.device), ranked, "amin")
    return worst.masked_fill_(worst == 255, RowStatus.OK).to(torch.uint8)


def pieces(logits: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    """Cut logits [P,V] or [N,S,V] into views [R,width] to be ranked in one go. Never a copy."""
    real = logits[..., :width]
    blocks: Sequence[torch.Tensor] = (real,)
    if real.dim() == 3:
        try:
            blocks = (real.view(real.shape[0] * real.shape[1], width),)
        except RuntimeError:  # e.g. logits[:, :-1]: only the positions of one sequence are even
            blocks = real.unbind(0)
    elements = _CPU_ELEMENTS if logits.device.type == "cpu" else _GPU_ELEMENTS
    step = max(1, elements // width)
    for block in blocks:
        for start in range(0, len(block), step):
            yield block[start : start + step]


def _select(
    rows: torch.Tensor,
    temperatures: Sequence[float],
    following: torch.Tensor | None,
    out: Selection,
) -> None:
    """Select from some rows [R,V] and write the result.

    All is taken relative to the row's largest logit, and the complement's sum relative to its
    own largest, so that neither large logits nor a small tail cost digits.
    """
    width = rows.shape[1]
    kept = min(out.topk_ids.shape[1], width)
    ranking = rank(rows, min(kept + 1, width))
    ids, values = ranking.ids[:, :kept], ranking.values[:, :kept]
    top, outside = values[:, :1], ranking.values[:, kept:] if kept < width else values[:, :1]
    outside = torch.where(outside == -torch.inf, top, outside)
    bad = (ranking.status != RowStatus.OK).unsqueeze(1)
    if kept < width:
        _, sums = complement_sums(rows, ids, temperatures=temperatures, top=outside)
    else:
        sums = torch.zeros_like(top).expand(-1, len(temperatures))
    scale = torch.tensor(list(temperatures), dtype=torch.float32, device=rows.device)
    gap = (outside - top) / scale
    heads = [row_sums(((values - top) / t).exp()) for t in temperatures]
    normaliser = (torch.stack(heads, 1) + gap.exp() * sums).log()
    _write(out.log_tail, gap + sums.log() - normaliser, bad)
    _write(out.logsumexp, top / scale + normaliser, bad)
    _write(out.topk_logprobs[:, :kept], values - top - normaliser[:, :1], bad)
    out.topk_ids[:, :kept] = ids.masked_fill((values == -torch.inf) | bad, -1)
    out.topk_ids[:, kept:] = -1
    out.topk_logprobs[:, kept:] = torch.where(bad, 0.0, -torch.inf)
    if out.topk_logits is not None:
        _write(out.topk_logits[:, :kept], values, bad)
        out.topk_logits[:, kept:] = torch.where(bad, 0.0, -torch.inf)
    out.status.copy_(ranking.status)
    if following is not None and out.actual_logprob is not None:
        next_ids = following.unsqueeze(1)
        actual = rows.gather(1, next_ids.clamp_min(0)).float() - top - normaliser[:, :1]
        _write(out.actual_logprob.unsqueeze(1), actual, bad | (next_ids < 0))


def _write(target: torch.Tensor, values: torch.Tensor, blank: torch.Tensor) -> None:
    """Cast ``values`` into ``target``, 0 where ``blank``."""
    write_values(target, values.masked_fill(blank, 0.0))


def write_values(target: torch.Tensor, values: torch.Tensor) -> None:
    """Cast ``values`` into ``target``, whatever its device. Only what is -inf becomes -inf.

    A logit masked with the least fp32 number, as models mask them, is beyond bf16 too.
    """
    if target.dtype in (torch.float16, torch.bfloat16) and values.dtype != target.dtype:
        least = torch.finfo(target.dtype).min
        values = torch.where(values == -torch.inf, values, values.clamp_min(least))
    target.copy_(values)


def _allocate(
    logits: torch.Tensor, k: int, temperatures: int, with_actual: bool, device: torch.device
) -> Selection:
    """Return tensors for a result; on the meta device where only their shapes are wanted."""
    positions = math.prod(logits.shape[:-1])

    def empty(dtype: torch.dtype, *axes: int) -> torch.Tensor:
        return torch.empty(positions, *axes, dtype=dtype, device=device)

    return Selection(
        topk_ids=empty(torch.int32, k),
        topk_logprobs=empty(torch.float32, k),
        log_tail=empty(torch.float32, temperatures),
        logsumexp=empty(torch.float32, temperatures),
        actual_logprob=empty(torch.float32) if with_actual else None,
        status=empty(torch.uint8),
    )
