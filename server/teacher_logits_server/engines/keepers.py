"""Keepers: what is kept of an engine's logits, by the rule that the request goes by.

    TopK        straight into the columns (``rule_selection``)
    Nucleus     the same, cut
    Sampled     a threshold sample, its uniforms by the row's digest and the position in the row
    ClientIds   the log-probabilities of the ids that came with the request

Promises: what is kept is where it will be read when ``keep`` returns, or, on a device, given to
its stream; the logits are only read. Each keeps ``status`` [P] of its positions, where its columns
are. Refuses nothing: ``scorer.jobs`` has looked at the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.layout import RowStatus
from teacher_logits.selection import Selection
from teacher_logits.selection.given_ids import score_given
from teacher_logits.selection.rule_selection import select_into
from teacher_logits.selection.sampling import sample_threshold
from teacher_logits.selection.uniforms import row_counters, uniforms
from teacher_logits.selection_rules import ClientIds, Sampled, SelectionRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits_server.engines.requests import Request


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """What a request wants kept: by which rule, of which columns of the vocabulary.

    ``ids`` int32 [P,M] are those of ``ClientIds``, None for every other rule.
    """

    selection: SelectionRule
    temperatures: tuple[float, ...]
    vocabulary_size: int
    ids: torch.Tensor | None = None


class Keeper(Protocol):
    """Fills the columns over positions of one answer."""

    status: torch.Tensor

    def keep(self, logits: torch.Tensor, part: slice) -> None:
        """Keep what is wanted of logits [c,V] of some positions."""

    def blank(self, part: slice) -> None:
        """Make some positions what those of a bad row are: ids -1, every number 0."""


def make_keeper(
    tensors: Mapping[Kind, torch.Tensor], request: Request, wanted: Wanted
) -> TopKKeeper | SampledKeeper | IdsKeeper:
    """Return the keeper for a request's rule, over its columns."""
    rule = wanted.selection
    if isinstance(rule, Sampled):
        return SampledKeeper(tensors, request, wanted, seed=rule.seed)
    if isinstance(rule, ClientIds) and wanted.ids is not None:
        return IdsKeeper(tensors, request, wanted, ids=wanted.ids)
    return TopKKeeper(tensors, request, wanted)


class TopKKeeper:
    """Keeps the K best of each position, cut to a nucleus where that is the rule."""

    def __init__(
        self, tensors: Mapping[Kind, torch.Tensor], request: Request, wanted: Wanted
    ) -> None:
        self._wanted = wanted
        self._next_ids = request.next_ids()
        self.selection = Selection(
            topk_ids=tensors[Kind.TOPK_IDS],
            topk_logprobs=tensors[Kind.TOPK_LOGPROBS],
            log_tail=tensors[Kind.LOG_TAIL],
            logsumexp=tensors[Kind.LOGSUMEXP],
            actual_logprob=tensors[Kind.ACTUAL_LOGPROB],
            status=_status(tensors[Kind.TOPK_IDS]),
        )
        self.status = self.selection.status

    def keep(self, logits: torch.Tensor, part: slice) -> None:
        """See ``Keeper``."""
        select_into(
            self.selection[part],
            logits,
            rule=self._wanted.selection,
            temperatures=self._wanted.temperatures,
            vocab_size=self._wanted.vocabulary_size,
            next_ids=self._next_ids[part],
        )

    def blank(self, part: slice) -> None:
        """See ``Keeper``."""
        self.selection[part].blank()


class SampledKeeper:
    """Keeps a sample of each position whose weights are unbiased, and the exact entropy."""

    def __init__(
        self,
        tensors: Mapping[Kind, torch.Tensor],
        request: Request,
        wanted: Wanted,
        *,
        seed: int,
    ) -> None:
        self._tensors = tensors
        self._vocabulary_size = wanted.vocabulary_size
        self._next_ids = request.next_ids()
        self._uniforms = _uniforms(request, seed)
        self.status = _status(tensors[Kind.SAMPLED_IDS])

    def keep(self, logits: torch.Tensor, part: slice) -> None:
        """See ``Keeper``."""
        own, ids = logits[:, : self._vocabulary_size], self._tensors[Kind.SAMPLED_IDS]
        drawn = self._uniforms[part].to(logits.device)
        sample = sample_threshold(own, m=ids.shape[1], uniforms=drawn)
        following = self._next_ids[part].to(logits.device)
        at = own.gather(1, following.clamp_min(0).unsqueeze(1)).squeeze(1)
        known = (following >= 0) & (sample.status == RowStatus.OK)
        actual = torch.where(known, at.double() - sample.logsumexp, 0.0)
        ids[part] = sample.ids.to(ids.device)
        for kind, values in (
            (Kind.SAMPLED_WEIGHTS, sample.weights),
            (Kind.ENTROPY, sample.entropy),
            (Kind.ACTUAL_LOGPROB, actual),
        ):
            self._tensors[kind][part].copy_(values)
        self.status[part] = sample.status.to(self.status.device)

    def blank(self, part: slice) -> None:
        """See ``Keeper``."""
        _blank(self._tensors, part, Kind.SAMPLED_IDS, Kind.SAMPLED_WEIGHTS, Kind.ENTROPY)


class IdsKeeper:
    """Keeps what the teacher says of the ids that came with the request, and of all others."""

    def __init__(
        self,
        tensors: Mapping[Kind, torch.Tensor],
        request: Request,
        wanted: Wanted,
        *,
        ids: torch.Tensor,
    ) -> None:
        self._tensors = tensors
        self._wanted = wanted
        self._ids = ids
        self._next_ids = request.next_ids()
        tensors[Kind.SCORED_IDS].copy_(ids)
        self.status = _status(tensors[Kind.SCORED_IDS])

    def keep(self, logits: torch.Tensor, part: slice) -> None:
        """See ``Keeper``."""
        scores = score_given(
            logits,
            self._ids[part],
            temperatures=self._wanted.temperatures,
            vocab_size=self._wanted.vocabulary_size,
            next_ids=self._next_ids[part],
        )
        for kind, values in (
            (Kind.SCORED_LOGPROBS, scores.logprobs),
            (Kind.LOG_TAIL, scores.log_tail),
            (Kind.LOGSUMEXP, scores.logsumexp),
            (Kind.ACTUAL_LOGPROB, scores.actual_logprob),
        ):
            if values is not None:
                self._tensors[kind][part].copy_(values)
        self.status[part] = scores.status.to(self.status.device)

    def blank(self, part: slice) -> None:
        """See ``Keeper``."""
        _blank(
            self._tensors,
            part,
            Kind.SCORED_IDS,
            Kind.SCORED_LOGPROBS,
            Kind.LOG_TAIL,
            Kind.LOGSUMEXP,
        )


def _blank(tensors: Mapping[Kind, torch.Tensor], part: slice, ids: Kind, *numbers: Kind) -> None:
    tensors[ids][part] = -1
    for kind in (*numbers, Kind.ACTUAL_LOGPROB):
        tensors[kind][part] = 0.0


def _status(beside: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(beside), dtype=torch.uint8, device=beside.device)


def _uniforms(request: Request, seed: int) -> torch.Tensor:
    """Return the uniform of each position, fp64 [P]."""
    windows = torch.tensor(request.windows)
    firsts, counts = windows[:, 0], windows[:, 1]
    starts = torch.tensor(request.position_starts[:-1])
    positions = torch.arange(request.position_count)
    positions += (firsts - starts).repeat_interleave(counts)
    rows = row_counters(request.digests()).repeat_interleave(counts)
    return uniforms(seed, rows, positions, torch.zeros_like(positions))
