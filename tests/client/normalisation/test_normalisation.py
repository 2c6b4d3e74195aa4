"""Normalising over a step, by random cuts: all that docs/math.md, "A step in parts", promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.normalisation.ranks import (
    Cut,
    Meeting,
    Model,
    Tokens,
    cut_tokens,
    losses_of,
    monolithic,
    run_step,
    tokens,
)

from teacher_logits_client.normalisation import (
    OpenStep,
    RepeatedMicroBatchError,
    StaleAttemptError,
    StepLoss,
    StepNormaliser,
    StepReport,
)

few = settings(max_examples=30)


def assert_same(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def one_rank(count: int) -> Cut:
    return Cut(ranks=1, rank_of=(0,) * count, micro_batch_of=(0,) * count)


def micro_batches_of(found: Tokens, count: int) -> list[list[int]]:
    return [list(range(len(found.mask)))[number::count] for number in range(count)]


def add(step: OpenStep, number: int, model: Model, found: Tokens, own: list[int]) -> None:
    """A micro batch of both losses, forward and backward."""
    policy = step.microbatch(number, *model.policy_loss(found, own), loss="policy")
    draft = step.microbatch(number, *model.draft_loss(found, own), loss="draft")
    (policy + draft).backward()


def whole_step(
    normaliser: StepNormaliser, model: Model, found: Tokens, owns: list[list[int]]
) -> StepReport:
    with normaliser.begin(step=7) as step:
        for number, own in enumerate(owns):
            add(step, number, model, found, own)
        return step.finish()


def clean_step(found: Tokens, owns: list[list[int]]) -> tuple[StepReport, Model]:
    model = Model()
    return whole_step(StepNormaliser(*losses_of(model, found)), model, found, owns), model


def assert_bitwise(model: Model, clean: Model) -> None:
    for one, other in ((model.policy, clean.policy), (model.draft, clean.draft)):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class TestAnyCut:
    """By ranks and micro batches, in any order, some without tokens."""

    @few
    @given(case=cut_tokens())
    def test_is_the_monolithic_step(self, case: tuple[Tokens, Cut]) -> None:
        policy, draft, policy_mean, draft_mean = monolithic(case[0])

        outcome = run_step(*case)

        assert_same(outcome.policy, policy)
        assert_same(outcome.draft, draft)
        for report in outcome.reports:
            assert report.losses["policy"].mean == pytest.approx(policy_mean, rel=1e-12)
            assert report.losses["draft"].mean == pytest.approx(draft_mean, rel=1e-12)

    @few
    @given(case=cut_tokens())
    def test_is_the_monolithic_step_in_fp32(self, case: tuple[Tokens, Cut]) -> None:
        policy, draft, _, _ = monolithic(case[0])

        outcome = run_step(case[0].to(torch.float32), case[1])

        assert outcome.policy.dtype == torch.float32
        assert_same(outcome.policy.double(), policy, 1e-5)
        assert_same(outcome.draft.double(), draft, 1e-5)

    @few
    @given(case=cut_tokens())
    def test_is_the_same_where_gradients_are_averaged(self, case: tuple[Tokens, Cut]) -> None:
        added, averaged = run_step(*case), run_step(*case, averaged=True)

        assert_same(averaged.policy, added.policy)
        assert_same(averaged.draft, added.draft)
        assert averaged.reports[0].losses == added.reports[0].losses

    @few
    @given(case=cut_tokens(), data=st.data())
    def test_may_have_its_ranks_and_micro_batches_in_any_order(
        self, case: tuple[Tokens, Cut], data: st.DataObject
    ) -> None:
        found, cut = case
        ranks = data.draw(st.permutations(range(cut.ranks)))
        numbers = data.draw(st.permutations(range(4)))
        other = replace(
            cut,
            rank_of=tuple(ranks[each] for each in cut.rank_of),
            micro_batch_of=tuple(numbers[each] for each in cut.micro_batch_of),
        )

        one, two = run_step(found, cut), run_step(found, other)

        assert_same(one.policy, two.policy)
        assert_same(one.draft, two.draft)
        assert two.reports[0].loss == pytest.approx(one.reports[0].loss, rel=1e-12)

    @few
    @given(case=cut_tokens())
    def test_gives_every_rank_the_same_report(self, case: tuple[Tokens, Cut]) -> None:
        first, *others = run_step(*case).reports

        assert all(other == first for other in others)
        assert first.ranks == case[1].ranks

    @few
    @given(case=cut_tokens())
    def test_is_reduced_once_and_by_as_many_numbers_on_an_idle_rank(
        self, case: tuple[Tokens, Cut]
    ) -> None:
        found, cut = case
        with_idle = replace(cut, ranks=cut.ranks + 1)
        meeting = Meeting(with_idle.ranks)

        outcome = run_step(found, with_idle, meeting=meeting)

        assert len(meeting.lengths) == with_idle.ranks
        assert len(set(meeting.lengths)) == 1
        assert_same(outcome.policy, run_step(found, cut).policy)


class TestNothingThatCounts:
    """Not one loss, or one of two."""

    @few
    @given(case=cut_tokens(), bad=st.sampled_from([math.nan, math.inf]))
    def test_leaves_gradients_of_exactly_0_and_finite_numbers(
        self, case: tuple[Tokens, Cut], bad: float
    ) -> None:
        none = torch.zeros_like(case[0].mask)
        spoilt = torch.full_like(case[0].features, bad)
        found = replace(case[0], mask=none, draft_mask=none, features=spoilt)

        outcome = run_step(found, case[1])

        assert torch.equal(outcome.policy, torch.zeros(3, dtype=torch.float64))
        assert torch.equal(outcome.draft, torch.zeros(3, dtype=torch.float64))
        for report in outcome.reports:
            assert report.loss == 0
            assert not report.should_step
            assert [each.mean for each in report.losses.values()] == [0, 0]

    def test_makes_no_number_of_a_loss_that_let_masked_nan_in(self) -> None:
        parameter = torch.ones(2, requires_grad=True)
        with StepNormaliser(StepLoss(parameters=[parameter])).begin(step=0) as step:
            step.microbatch(0, (parameter * math.nan).sum(), 0).backward()
            report = step.finish()

        assert report.losses["loss"].sums == (0.0,)
        assert report.loss == 0
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [0, 0]

    @few
    @given(case=cut_tokens())
    def test_in_the_policy_leaves_the_draft_its_own_gradients(
        self, case: tuple[Tokens, Cut]
    ) -> None:
        found = replace(case[0], mask=torch.zeros_like(case[0].mask))
        _, draft, _, _ = monolithic(case[0])

        outcome = run_step(found, case[1])

        assert_same(outcome.draft, draft)
        assert not outcome.policy.any()


class TestWeights:
    """Of positions, and of one loss beside another."""

    @few
    @given(case=cut_tokens(), factor=st.floats(1e-3, 1e3))
    def test_of_samples_that_are_all_scaled_change_nothing(
        self, case: tuple[Tokens, Cut], factor: float
    ) -> None:
        found = case[0]
        scaled = replace(found, mask=found.mask * factor, draft_mask=found.draft_mask * factor)

        one, two = run_step(*case), run_step(scaled, case[1])

        assert_same(two.policy, one.policy)
        assert_same(two.draft, one.draft)

    @few
    @given(case=cut_tokens(), data=st.data())
    def test_of_the_policy_leave_the_draft_alone_and_the_other_way_round(
        self, case: tuple[Tokens, Cut], data: st.DataObject
    ) -> None:
        found, cut = case
        masks = st.lists(
            st.sampled_from([0.0, 1.0]), min_size=len(found.mask), max_size=len(found.mask)
        )
        other = torch.tensor(data.draw(masks), dtype=torch.float64)

        outcome = run_step(found, cut)

        assert torch.equal(run_step(replace(found, mask=other), cut).draft, outcome.draft)
        assert torch.equal(run_step(replace(found, draft_mask=other), cut).policy, outcome.policy)


class TestAttempts:
    """One that is aborted, and what comes twice or late."""

    @few
    @given(found=tokens(least=2), after=st.integers(0, 3))
    def test_a_step_after_an_abort_is_bitwise_a_clean_one(self, found: Tokens, after: int) -> None:
        owns, model = micro_batches_of(found, 3), Model()
        normaliser = StepNormaliser(*losses_of(model, found))
        step = normaliser.begin(step=7)
        for number in range(after):
            add(step, number, model, found, owns[number])
        normaliser.abort()

        report = whole_step(normaliser, model, found, owns)

        expected, clean = clean_step(found, owns)
        assert (report.attempt, expected.attempt) == (1, 0)
        assert report.losses == expected.losses
        assert_bitwise(model, clean)

    @few
    @given(found=tokens(least=2))
    def test_a_micro_batch_that_comes_again_changes_nothing(self, found: Tokens) -> None:
        owns, model = micro_batches_of(found, 2), Model()
        normaliser = StepNormaliser(*losses_of(model, found))
        with normaliser.begin(step=7) as step:
            for number, own in enumerate(owns):
                add(step, number, model, found, own)
                with pytest.raises(RepeatedMicroBatchError):
                    add(step, number, model, found, own)
            report = step.finish()

        expected, clean = clean_step(found, owns)
        assert report == expected
        assert_bitwise(model, clean)

    @few
    @given(found=tokens(least=2))
    def test_what_belongs_to_a_stale_attempt_changes_nothing(self, found: Tokens) -> None:
        owns, model = micro_batches_of(found, 2), Model()
        normaliser = StepNormaliser(*losses_of(model, found))
        stale = normaliser.begin(step=7)
        normaliser.abort()
        with normaliser.begin(step=7) as step:
            for number, own in enumerate(owns):
                add(step, number, model, found, own)
                with pytest.raises(StaleAttemptError):
                    add(stale, number, model, found, own)
                with pytest.raises(StaleAttemptError):
                    stale.finish()
                stale.abort()
            report = step.finish()

        expected, clean = clean_step(found, owns)
        assert report.losses == expected.losses
        assert_bitwise(model, clean)


class TestReportedLoss:
    """Computed again from the dense distributions."""

    @few
    @given(case=cut_tokens())
    def test_is_that_of_the_dense_step(self, case: tuple[Tokens, Cut]) -> None:
        found = case[0]
        whole = run_step(found, one_rank(len(found.mask))).reports[0]
        _, _, policy_mean, draft_mean = monolithic(found)

        report = run_step(*case).reports[0]

        assert report.loss == pytest.approx(policy_mean + draft_mean, rel=1e-12)
        assert report.losses["policy"].counts == (float(found.mask.sum()),)
        assert report.losses["draft"].sums == pytest.approx(whole.losses["draft"].sums, rel=1e-12)
