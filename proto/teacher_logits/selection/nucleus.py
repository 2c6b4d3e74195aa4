"""Nucleus: a selection cut where enough of the mass lies before, and its jagged form.

An entry is kept where the true mass before it, of the whole vocabulary, is below the nucleus's;
the first few are kept in any case. What is cut off joins the tail, at every temperature, so that
each position still sums to one (docs/math.md, "Nucleus").

Promises: the entries that stay are the same bits as before. In a rectangle [P,K] the others are
-1 and -inf, as where fewer entries exist; ``pack`` leaves them out, which is what saves bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.selection.checks import check_settings
from teacher_logits.selection_rules import Nucleus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class JaggedEntries:
    """The entries of P positions, one position's behind the other's.

    ``ids`` int32 and ``logprobs`` [sum of counts]; ``offsets`` int64 [P+1] says whose is which.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    offsets: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """How many entries each position has, int64 [P]."""
        return self.offsets.diff()


def cap_nucleus(
    selection: Selection, nucleus: Nucleus, *, temperatures: Sequence[float] = (1.0,)
) -> Selection:
    """Return a selection cut to its nucleus, with tensors of its own where they change.

    ``temperatures`` are those of the columns of ``log_tail`` and ``logsumexp``. The sums are
    fp32 at least: cut before log-probabilities are rounded to 16 bits, not after.

    Raises:
        PayloadInvalidError: there are other temperatures than columns, or no nucleus.
    """
    if not isinstance(nucleus, Nucleus):
        raise PayloadInvalidError(
            f"the nucleus is {nucleus!r}: give Nucleus(mass=...)",
            facts={"given": type(nucleus).__name__},
        )
    columns = selection.log_tail.shape[1]
    check_settings(1, temperatures)
    if len(temperatures) != columns:
        raise PayloadInvalidError(
            f"{len(temperatures)} temperatures are given and the selection has {columns}",
            facts={"temperatures": len(temperatures), "columns": columns},
        )
    values = selection.topk_logprobs.double()
    masses = values.exp()
    before = masses.cumsum(1) - masses
    places = torch.arange(values.shape[1], device=values.device)
    cut = (before >= nucleus.mass) & (places >= nucleus.least) & (selection.topk_ids >= 0)
    scale = torch.tensor(list(temperatures), dtype=torch.float64, device=values.device)
    normalisers = selection.logsumexp.double()
    # At a temperature: the logit divided by it, minus its own normaliser. Of log-probabilities,
    # since logits have no digits left for them where they are large.
    gone = values.masked_fill(~cut, -torch.inf).unsqueeze(2) / scale
    moved = gone.logsumexp(1) + (normalisers[:, :1] / scale - normalisers)
    tail = torch.logaddexp(selection.log_tail.double(), moved)
    raw = selection.topk_logits
    return replace(
        selection,
        topk_ids=selection.topk_ids.masked_fill(cut, -1),
        topk_logprobs=selection.topk_logprobs.masked_fill(cut, -torch.inf),
        log_tail=tail.to(selection.log_tail.dtype),
        topk_logits=None if raw is None else raw.masked_fill(cut, -torch.inf),
    )


def pack(ids: torch.Tensor, logprobs: torch.Tensor) -> JaggedEntries:
    """Return entries [P,K] without those that are absent, which stand behind the others."""
    there = ids >= 0
    counts = there.sum(1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return JaggedEntries(ids=ids[there], logprobs=logprobs[there], offsets=offsets)


def unpack(entries: JaggedEntries, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and log-probabilities [P,width], -1 and -inf where there is no entry.

    Raises:
        PayloadInvalidError: a position has more entries than ``width``.
    """
    counts = entries.counts
    most = int(counts.max()) if len(counts) else 0
    if most > width:
        raise PayloadInvalidError(
            f"a position has {most} entries, and a rectangle of {width} is asked for: give at "
            f"least {most}",
            facts={"entries": most, "width": width},
        )
    there = torch.arange(width, device=counts.device) < counts.unsqueeze(1)
    ids = entries.ids.new_full(there.shape, -1)
    logprobs = entries.logprobs.new_full(there.shape, -torch.inf)
    ids[there], logprobs[there] = entries.ids, entries.logprobs
    return ids, logprobs
