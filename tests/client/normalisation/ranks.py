"""Ranks as threads of one process, with a reduction among them, and a model small enough to check.

Tokens lie in a table; a cut says which rank and which micro batch has each. The answers are
those of one rank that has them all.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from hypothesis import strategies as st

from teacher_logits_client.normalisation import (
    Reduction,
    RescaleOrder,
    StepLoss,
    StepNormaliser,
    StepReport,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

T = TypeVar("T")
WIDTH = 3


class Meeting:
    """Adds up what as many ranks bring; `lengths` has the length of everything that was brought."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=30)
        self._brought = [torch.empty(0)] * ranks
        self.lengths: list[int] = []

    def of(self, rank: int) -> Reduction:
        return _Seat(self, rank)

    def sum(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        self._brought[rank] = values
        self.lengths.append(len(values))
        self._barrier.wait()
        total = torch.stack(self._brought).sum(0)
        self._barrier.wait()
        return total


@dataclass(frozen=True)
class _Seat:
    meeting: Meeting
    rank: int

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.meeting.sum(self.rank, values)


def on_ranks(ranks: int, story: Callable[[int], T]) -> list[T]:
    """What each rank makes of it, all at the same time."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(story, range(ranks)))


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """`features` [T,3], `mask` [T] of the policy, `draft_mask` [T] and `bins` [T] of the draft."""

    features: torch.Tensor
    mask: torch.Tensor
    draft_mask: torch.Tensor
    bins: torch.Tensor
    bin_weights: tuple[float, ...] = (1.0, 0.25)

    def to(self, dtype: torch.dtype) -> Tokens:
        return Tokens(
            features=self.features.to(dtype),
            mask=self.mask.to(dtype),
            draft_mask=self.draft_mask.to(dtype),
            bins=self.bins,
        )


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The rank and the micro batch of each token; ranks may have none."""

    ranks: int
    rank_of: tuple[int, ...]
    micro_batch_of: tuple[int, ...]

    def micro_batches(self, rank: int) -> list[list[int]]:
        """The tokens of each micro batch of a rank, in order."""
        own = [token for token, owner in enumerate(self.rank_of) if owner == rank]
        numbers = sorted({self.micro_batch_of[token] for token in own})
        return [[t for t in own if self.micro_batch_of[t] == number] for number in numbers]


class Model:
    """A policy and a draft of it, each of three parameters; their losses are not linear."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.policy = torch.tensor([0.5, -1.0, 0.25], dtype=dtype, requires_grad=True)
        self.draft = torch.tensor([-0.5, 0.75, 1.5], dtype=dtype, requires_grad=True)

    def policy_loss(self, tokens: Tokens, own: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        each = torch.nn.functional.softplus(tokens.features[own] @ self.policy)
        return masked_sum(each, tokens.mask[own]), tokens.mask[own].sum()

    def draft_loss(self, tokens: Tokens, own: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = tokens.features[own] * self.policy.detach()
        each = (hidden @ self.draft).square()
        masks = [tokens.draft_mask[own] * (tokens.bins[own] == b) for b in (0, 1)]
        sums = torch.stack([masked_sum(each, mask) for mask in masks])
        return sums, torch.stack([mask.sum() for mask in masks])


def masked_sum(each: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What is masked does not enter the value; NaN in it enters the gradient all the same."""
    return torch.where(mask > 0, each * mask, 0.0).sum()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The gradients after all ranks' were put together, and each rank's report."""

    policy: torch.Tensor
    draft: torch.Tensor
    reports: list[StepReport]


def losses_of(model: Model, tokens: Tokens) -> tuple[StepLoss, StepLoss]:
    return (
        StepLoss(name="policy", parameters=[model.policy]),
        StepLoss(name="draft", parameters=[model.draft], bin_weights=tokens.bin_weights),
    )


def run_step(
    tokens: Tokens,
    cut: Cut,
    *,
    order: RescaleOrder = RescaleOrder.DIRECT,
    averaged: bool = False,
    meeting: Meeting | None = None,
) -> Outcome:
    """One step over all ranks, by a framework that adds gradients up or averages them."""
    meeting = meeting or Meeting(cut.ranks)
    models = [Model(tokens.features.dtype) for _ in range(cut.ranks)]

    def story(rank: int) -> StepReport:
        normaliser = StepNormaliser(
            *losses_of(models[rank], tokens),
            reduction=meeting.of(rank),
            gradients_averaged_over=cut.ranks if averaged else 1,
            order=order,
        )
        with normaliser.begin(step=7) as step:
            for number, own in enumerate(cut.micro_batches(rank)):
                policy = models[rank].policy_loss(tokens, own)
                draft = models[rank].draft_loss(tokens, own)
                (
                    step.microbatch(number, *policy, loss="policy")
                    + step.microbatch(number, *draft, loss="draft")
                ).backward()
            return step.finish()

    reports = on_ranks(cut.ranks, story)
    policy, draft = (
        together([model.policy for model in models]),
        together([model.draft for model in models]),
    )
    share = cut.ranks if averaged else 1
    return Outcome(policy=policy / share, draft=draft / share, reports=reports)


def together(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the ranks' gradients; a rank without any has 0."""
    found: Iterable[torch.Tensor] = (
        torch.zeros_like(each) if each.grad is None else each.grad for each in parameters
    )
    return torch.stack(list(found)).sum(0)


def monolithic(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """By the definition, of all tokens at once: both gradients and both means; 0 over no count."""
    model, everything = Model(tokens.features.dtype), list(range(len(tokens.mask)))
    sums, counts = model.policy_loss(tokens, everything)
    bin_sums, bin_counts = model.draft_loss(tokens, everything)
    weights = torch.tensor(tokens.bin_weights, dtype=sums.dtype)
    draft_sum, draft_count = bin_sums @ weights, bin_counts @ weights
    means = [
        s / c if float(c.detach()) > 0 else s * 0
        for s, c in ((sums, counts), (draft_sum, draft_count))
    ]
    (means[0] + means[1]).backward()
    assert model.policy.grad is not None
    assert model.draft.grad is not None
    return model.policy.grad, model.draft.grad, float(means[0].detach()), float(means[1].detach())


@st.composite
def tokens(draw: st.DrawFn, *, least: int = 1) -> Tokens:
    count = draw(st.integers(least, 24))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    masks = st.lists(st.sampled_from([0.0, 1.0, 1.0, 0.5]), min_size=count, max_size=count)
    bins = st.lists(st.integers(0, 1), min_size=count, max_size=count)
    return Tokens(
        features=torch.randn(count, WIDTH, generator=generator, dtype=torch.float64),
        mask=torch.tensor(draw(masks), dtype=torch.float64),
        draft_mask=torch.tensor(draw(masks), dtype=torch.float64),
        bins=torch.tensor(draw(bins)),
    )


@st.composite
def cuts(draw: st.DrawFn, count: int) -> Cut:
    ranks = draw(st.integers(1, 4))
    owners = st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count)
    numbers = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    return Cut(ranks=ranks, rank_of=tuple(draw(owners)), micro_batch_of=tuple(draw(numbers)))


@st.composite
def cut_tokens(draw: st.DrawFn) -> tuple[Tokens, Cut]:
    found = draw(tokens())
    return found, draw(cuts(len(found.mask)))
