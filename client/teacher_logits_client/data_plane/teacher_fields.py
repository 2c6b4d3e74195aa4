"""Teacher's fields: a payload, a batch or targets of ours in the fields of a store.

Position s of a row stands at its token s, and speaks of token s+1, as NeMo RL has it: a row of L
tokens has L entries. Positions that were not asked for, or that the teacher could not score, are
written as what they are: no entry (id -1), and all the mass in the tail.

The fields are copies: they outlive the lease of what they were made from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.data_plane.fields import ABSENT_ID
from teacher_logits_client.data_plane.jagged import Lengths, nest, row_lengths
from teacher_logits_client.targets import ABSENT_LOGPROB, Targets
from teacher_logits_client.trainers.nemo_rl import INDICES, LOGITS, TAIL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits_client.data_plane.fields import TopKForm


class Source(Protocol):
    """A leased payload, a batch or a micro batch of one."""

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The columns by name, flat over positions."""

    def targets_at(self, temperature: float) -> Targets:
        """Return targets at one of the payload's temperatures."""


def teacher_fields(
    source: Targets | Source, lengths: Lengths, form: TopKForm, *, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return the fields of ``form``, nested, of N rows of ``lengths`` tokens each.

    Args:
        source: what ``session.score`` or ``session.acquire`` gave, under its lease; or targets.
        lengths: tokens of each row, of those with no position too; rows of a batch that are
            padding have none.
        form: as the store's other writers and readers have it.
        temperature: of the log-probabilities, one that the payload has. Of targets, theirs.

    Raises:
        PayloadInvalidError: another K or number of rows than promised, a row with more positions
            than tokens, a position to learn from with fewer than K entries, a sample, or raw
            logits of a source that has none.
        LeaseLostError: the lease is closed.
    """
    targets = source if isinstance(source, Targets) else source.targets_at(temperature)
    targets.check_open()
    sizes = row_lengths(lengths)
    _check_entries(targets, form, rows=len(sizes))
    places = _places(targets, sizes)
    k, total = form.k, int(sizes.sum())
    ids = targets.topk_ids.reshape(-1, k)
    values = _raw_logits(source) if form.raw_logits else targets.topk_logprobs
    values = values.reshape(-1, k).float().masked_fill(ids < 0, ABSENT_LOGPROB)
    flat = {
        LOGITS: values.new_full((total, k), ABSENT_LOGPROB, dtype=form.value_type),
        INDICES: ids.new_full((total, k), ABSENT_ID, dtype=form.index_type),
    }
    flat[LOGITS][places] = values.to(form.value_type)
    flat[INDICES][places] = ids.to(form.index_type)
    if form.with_tail:
        flat[TAIL] = targets.log_tail.new_zeros(total)
        flat[TAIL][places] = targets.log_tail.reshape(-1)
    return {name: nest(each, sizes) for name, each in flat.items()}


def _check_entries(targets: Targets, form: TopKForm, *, rows: int) -> None:
    if targets.sampled:
        raise PayloadInvalidError(
            "the targets are a sample with weights, and a trainer would take them for "
            "log-probabilities of the K best: open the session without a selection"
        )
    has, k = len(targets.row_offsets) - 1, targets.topk_ids.shape[-1]
    if has != rows or k != form.k:
        raise PayloadInvalidError(
            f"the targets have {has} rows of {k} entries a position, and {rows} lengths and a form "
            f"of k={form.k} were given: give one length a row, and a session's top_k as the form's",
            facts={"rows": has, "lengths": rows, "k": k, "form_k": form.k},
        )
    ids = targets.topk_ids.reshape(-1, k)
    short = ((ids < 0).any(1) & targets.valid.reshape(-1)).nonzero().flatten()
    if len(short):
        raise PayloadInvalidError(
            f"position {int(short[0])} has fewer than K = {k} entries ({len(short)} such "
            "positions), for which trainers have no sign: open the session with a top_k of no "
            "more than the vocabulary has",
            facts={"position": int(short[0]), "positions": len(short), "k": k},
        )


def _places(targets: Targets, sizes: torch.Tensor) -> torch.Tensor:
    """Return where each position stands among the tokens of all rows, int64 [P]."""
    counts = targets.row_offsets.diff()
    firsts = torch.zeros_like(counts) if targets.row_firsts is None else targets.row_firsts
    own = sizes.to(counts.device)
    firsts = firsts.where(counts > 0, 0)
    beyond = (firsts + counts > own).nonzero().flatten()
    if len(beyond):
        row = int(beyond[0])
        raise PayloadInvalidError(
            f"row {row} has {int(counts[row])} positions from {int(firsts[row])} on, and a length "
            f"of {int(own[row])}: give the tokens of the rows that were scored",
            facts={"row": row, "positions": int(counts[row]), "length": int(own[row])},
        )
    starts = own.cumsum(0) - own + firsts - targets.row_offsets[:-1]
    places = starts.repeat_interleave(counts)
    return places + torch.arange(len(places), device=places.device)


def _raw_logits(source: Targets | Source) -> torch.Tensor:
    columns = {} if isinstance(source, Targets) else source.columns
    if "topk_logits" not in columns:
        has = ", ".join(columns) or "none, being targets alone"
        raise PayloadInvalidError(
            f"raw logits are wanted, and the source has the columns {has}: give a payload of a "
            "session opened with StudentProfile(columns=(ColumnKind.TOPK_LOGITS,))",
            facts={"column": "topk_logits"},
        )
    return columns["topk_logits"]
