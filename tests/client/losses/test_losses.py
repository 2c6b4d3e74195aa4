"""Forward KL with the tail as a bucket: its value, its gradient, and what may not disturb it."""

import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.client.losses.losses_by_definition import Loss, normal, targets_of
from tests.client.targets.made_arrays import Sizes

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind
from teacher_logits_client.losses import (
    Tail,
    forward_kl,
    reverse_kl,
    skew_reverse_kl,
    soft_cross_entropy,
)
from teacher_logits_client.targets import Targets, make_targets

WIDTH = 30


def dense_kl(
    teacher: torch.Tensor, student: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    p, q = ((x.double() / temperature).log_softmax(-1) for x in (teacher, student))
    return torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)


def bucket_kl(targets: Targets, student: torch.Tensor) -> torch.Tensor:
    """Plain autograd over K+1 categories [P], by the definition."""
    log_q = (student / targets.temperature).log_softmax(1)
    ids = targets.topk_ids.long()
    present = ids >= 0
    chosen = log_q.gather(1, ids.clamp_min(0))
    rows = present.nonzero()[:, 0]
    kept = torch.zeros_like(log_q, dtype=torch.bool).index_put(
        (rows, ids[present]), torch.tensor(True)
    )
    log_q0 = log_q.masked_fill(kept, -torch.inf).logsumexp(1)
    p, p0 = targets.topk_logprobs, targets.log_tail
    terms = torch.where(present, p.exp() * (p - chosen), 0.0).sum(1)
    return terms + torch.where(p0 > -1e4, p0.exp() * (p0 - log_q0), 0.0)


def value_and_gradient(
    student: torch.Tensor, targets: Targets, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    leaf = student.detach().clone().requires_grad_()
    loss, count = forward_kl(leaf, targets, mask)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, count


seeds = st.integers(0, 2**32)
temperatures = st.sampled_from([1.0, 0.5, 2.0])


class TestValue:
    @given(seeds, temperatures, st.integers(0, 3))
    def test_is_the_dense_divergence_where_nothing_is_outside(
        self, seed: int, temperature: float, spare: int
    ) -> None:
        teacher, student = normal(4, WIDTH, seed=seed), normal(4, WIDTH, seed=seed + 1)
        targets = targets_of(teacher, k=WIDTH, temperature=temperature, width=WIDTH + spare)

        loss, count = forward_kl(student, targets)

        expected = temperature**2 * dense_kl(teacher, student, temperature).sum()
        assert torch.allclose(loss, expected, atol=1e-10)
        assert int(count) == 4

    @given(seeds, st.integers(1, WIDTH - 1), st.sampled_from([0.1, 2.0, 8.0]))
    def test_lies_between_zero_and_the_dense_divergence(
        self, seed: int, k: int, scale: float
    ) -> None:
        teacher = normal(1, WIDTH, seed=seed, scale=scale)
        student = normal(1, WIDTH, seed=seed + 1, scale=scale)

        loss, _ = forward_kl(student, targets_of(teacher, k=k))

        assert -1e-12 <= float(loss) <= float(dense_kl(teacher, student)) + 1e-12

    @given(seeds, st.integers(1, WIDTH), temperatures)
    def test_is_zero_where_the_student_is_the_teacher(
        self, seed: int, k: int, temperature: float
    ) -> None:
        teacher = normal(3, WIDTH, seed=seed)

        loss, gradient, _ = value_and_gradient(
            teacher, targets_of(teacher, k=k, temperature=temperature)
        )

        assert abs(float(loss)) < 1e-12
        assert gradient.abs().max() < 1e-12

    @given(seeds, st.integers(1, 20), temperatures)
    def test_and_gradient_are_those_of_plain_autograd(
        self, seed: int, k: int, temperature: float
    ) -> None:
        teacher, student = normal(5, WIDTH, seed=seed), normal(5, WIDTH, seed=seed + 1)
        targets = targets_of(teacher, k=k, temperature=temperature, width=k + 2)
        leaf = student.clone().requires_grad_()
        (temperature**2 * bucket_kl(targets, leaf).sum()).backward()

        loss, gradient, _ = value_and_gradient(student, targets)

        assert torch.allclose(loss, temperature**2 * bucket_kl(targets, student).sum(), atol=1e-10)
        assert leaf.grad is not None
        assert torch.allclose(gradient, leaf.grad, atol=1e-10)


class TestGradient:
    @pytest.mark.parametrize("k", [1, 4, 9])
    @pytest.mark.parametrize("temperature", [1.0, 2.0])
    @pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 0.0, 0.25, 3.0])])
    def test_is_what_finite_differences_say(
        self, k: int, temperature: float, weights: torch.Tensor | None
    ) -> None:
        targets = targets_of(normal(4, 9, seed=1), k=k, temperature=temperature, width=11)
        student = normal(4, 9, seed=2).requires_grad_()

        assert torch.autograd.gradcheck(
            lambda z: 0.7 * forward_kl(z, targets, weights)[0], (student,)
        )

    @given(seeds)
    def test_of_a_position_sums_to_zero(self, seed: int) -> None:
        _, gradient, _ = value_and_gradient(
            normal(6, WIDTH, seed=seed), targets_of(normal(6, WIDTH, seed=seed + 1), k=5)
        )

        assert gradient.sum(1).abs().max() < 1e-12

    @pytest.mark.parametrize("tail", [1e-3, 1e-6, 1e-9, 1e-20])
    def test_lives_on_where_the_students_tail_is_tiny(self, tail: float) -> None:
        student = torch.zeros(1, 4096)
        student[0, 1:] = math.log(tail / 4095)
        teacher = torch.zeros(1, 4096)
        teacher[0, 0] = math.log(4095 * 0.95 / 0.05)

        loss, gradient, _ = value_and_gradient(student, targets_of(teacher, k=1))

        q0 = tail / (1 + tail)
        expected = 0.95 * math.log(0.95 / (1 - q0)) + 0.05 * math.log(0.05 / q0)
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        assert float(gradient[0, 1:].sum()) == pytest.approx(q0 - 0.05, rel=1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_comes_in_the_type_of_the_logits(self, dtype: torch.dtype) -> None:
        student = normal(6, WIDTH, seed=3).to(dtype)
        targets = targets_of(normal(6, WIDTH, seed=4), k=5)
        exact_loss, exact, _ = value_and_gradient(student.double(), targets)

        loss, gradient, _ = value_and_gradient(student, targets)

        assert loss.dtype == torch.float32
        assert gradient.dtype == dtype
        assert torch.allclose(loss.double(), exact_loss, rtol=1e-5)
        assert torch.allclose(gradient.double(), exact, atol=1e-5, rtol=torch.finfo(dtype).eps)

    def test_of_many_rows_is_that_of_each(self) -> None:
        student = normal(40, 40_000, seed=5).float()
        targets = targets_of(normal(40, 40_000, seed=6), k=7)
        mask = torch.arange(40) % 3 != 1

        _, gradient, _ = value_and_gradient(student, targets, mask)

        for row in (0, 1, 38, 39):
            alone = replace(
                targets,
                topk_ids=targets.topk_ids[row : row + 1],
                topk_logprobs=targets.topk_logprobs[row : row + 1],
                log_tail=targets.log_tail[row : row + 1],
                valid=mask[row : row + 1],
                row_offsets=torch.tensor([0, 1]),
            )
            _, expected, _ = value_and_gradient(student[row : row + 1], alone)
            assert torch.allclose(gradient[row : row + 1], expected, atol=1e-7)


class TestMemory:
    @pytest.mark.parametrize(
        ("kept", "loss"),
        [("some", forward_kl), ("all", partial(reverse_kl, tail=Tail.NEMO_FLOOR))],
        ids=["some", "all, with a floor"],
    )
    def test_the_gradient_is_the_only_array_of_the_size_of_the_logits(
        self, kept: str, loss: Loss
    ) -> None:
        student = torch.zeros(150, 40_000, requires_grad=True)
        targets = targets_of(normal(150, 50, seed=1), k=5)
        mask = torch.arange(150) % 5 != 4 if kept == "some" else None
        with Sizes(student) as sizes:
            loss(student, targets, mask)[0].backward()

        assert sizes.larger_than(student.numel() / 4) == [student.numel()]


class TestMasks:
    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("by", ["mask", "valid"])
    def test_positions_left_out_add_exactly_nothing(self, garbage: float, by: str) -> None:
        student, teacher = normal(5, WIDTH, seed=7), normal(5, WIDTH, seed=8)
        keep = torch.tensor([True, False, True, True, False])
        targets = targets_of(teacher, k=4)
        expected, gradient, _ = value_and_gradient(student[keep], targets_of(teacher[keep], k=4))
        student[~keep] = garbage
        if by == "valid":
            targets = replace(targets, valid=keep)

        loss, got, count = value_and_gradient(student, targets, keep if by == "mask" else None)

        assert torch.allclose(loss, expected, atol=1e-12)
        assert int(count) == 3
        assert (got[~keep] == 0).all()
        assert torch.allclose(got[keep], gradient, atol=1e-12)

    def test_a_nan_that_counts_is_not_hidden(self) -> None:
        student = normal(3, WIDTH, seed=7)
        student[1, 4] = math.nan

        assert forward_kl(student, targets_of(normal(3, WIDTH, seed=8), k=4))[0].isnan()

    def test_with_everything_left_out_all_is_zero(self) -> None:
        student = torch.full((3, WIDTH), math.nan)

        loss, gradient, count = value_and_gradient(
            student, targets_of(normal(3, WIDTH, seed=9), k=4), torch.zeros(3)
        )

        assert float(loss) == 0
        assert float(count) == 0
        assert (gradient == 0).all()

    @given(seeds, st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=4, max_size=4))
    def test_weights_weigh_loss_and_count(self, seed: int, weights: list[float]) -> None:
        student, teacher = normal(4, WIDTH, seed=seed), normal(4, WIDTH, seed=seed + 1)
        targets = targets_of(teacher, k=4)

        loss, count = forward_kl(student, targets, torch.tensor(weights))

        each = bucket_kl(targets, student)
        assert torch.allclose(loss, (each * torch.tensor(weights)).sum(), atol=1e-10)
        assert float(count) == sum(weights)

    def test_a_position_that_is_not_valid_has_no_weight(self) -> None:
        targets = replace(
            targets_of(normal(3, WIDTH, seed=1), k=4), valid=torch.tensor([True, False, True])
        )

        _, count = forward_kl(normal(3, WIDTH, seed=2), targets, torch.tensor([2.0, 5.0, 0.5]))

        assert float(count) == 2.5

    @given(seeds, st.integers(1, 11))
    def test_parts_of_a_batch_add_up_to_it(self, seed: int, cut: int) -> None:
        student, teacher = normal(12, WIDTH, seed=seed), normal(12, WIDTH, seed=seed + 1)
        mask = normal(12, seed=seed + 2) > 0

        whole, count = forward_kl(student, targets_of(teacher, k=4), mask)
        parts = [
            forward_kl(student[p], targets_of(teacher[p], k=4), mask[p])
            for p in (slice(0, cut), slice(cut, 12))
        ]

        assert torch.allclose(sum((p[0] for p in parts), torch.zeros(())), whole, atol=1e-12)
        assert sum(int(p[1]) for p in parts) == int(count)


class TestEdges:
    def test_absent_entries_do_not_touch_column_zero(self) -> None:
        teacher = torch.full((2, WIDTH), -torch.inf, dtype=torch.float64)
        teacher[0, [0, 3, 7]] = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
        teacher[1, 5] = 1.0
        student = normal(2, WIDTH, seed=3)
        leaf = student.clone().requires_grad_()
        dense_kl(teacher, leaf).sum().backward()

        loss, gradient, _ = value_and_gradient(student, targets_of(teacher, k=6))

        assert torch.allclose(loss, dense_kl(teacher, student).sum(), atol=1e-10)
        assert leaf.grad is not None
        assert torch.allclose(gradient, leaf.grad, atol=1e-12)

    def test_columns_that_the_student_rules_out_change_nothing(self) -> None:
        student, teacher = normal(3, WIDTH, seed=4), normal(3, WIDTH, seed=5)
        targets = targets_of(teacher, k=5)
        padded = torch.cat([student, torch.full((3, 8), -torch.inf, dtype=torch.float64)], 1)
        expected, plain, _ = value_and_gradient(student, targets)

        loss, gradient, _ = value_and_gradient(padded, targets)

        assert torch.allclose(loss, expected, atol=1e-12)
        assert torch.allclose(gradient[:, :WIDTH], plain, atol=1e-12)
        assert (gradient[:, WIDTH:] == 0).all()

    def test_mass_on_what_the_student_rules_out_is_infinite_with_a_finite_gradient(self) -> None:
        teacher, student = normal(1, WIDTH, seed=6), normal(1, WIDTH, seed=7)
        targets = targets_of(teacher, k=5)
        student[0, int(targets.topk_ids[0, 0])] = -torch.inf

        loss, gradient, _ = value_and_gradient(student, targets)

        assert float(loss) == math.inf
        assert gradient.isfinite().all()

    def test_a_student_without_a_tail_has_a_finite_gradient(self) -> None:
        teacher = normal(1, WIDTH, seed=8)
        targets = targets_of(teacher, k=5)
        student = torch.full((1, WIDTH), -torch.inf, dtype=torch.float64)
        student[0, targets.topk_ids[0].long()] = 1.0

        loss, gradient, _ = value_and_gradient(student, targets)

        assert float(loss) == math.inf
        assert gradient.isfinite().all()

    def test_rectangles_are_their_positions(self) -> None:
        student, teacher = normal(2, 3, WIDTH, seed=9), normal(6, WIDTH, seed=10)
        targets = replace(targets_of(teacher, k=5), row_offsets=torch.tensor([0, 3, 6]))
        mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
        flat, gradient, count = value_and_gradient(student.flatten(0, 1), targets, mask.flatten())

        for given_targets in (targets, targets.rectangular()):
            loss, got, counted = value_and_gradient(student, given_targets, mask)
            assert torch.equal(loss, flat)
            assert torch.equal(got.flatten(0, 1), gradient)
            assert int(counted) == int(count) == 4

    def test_no_positions_are_no_loss(self) -> None:
        loss, _, count = value_and_gradient(
            torch.zeros(0, WIDTH), targets_of(normal(0, WIDTH, seed=1), k=5)
        )

        assert float(loss) == int(count) == 0


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """First position and count of each row, and S, which they fit into."""
    rows = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5))
    longest = max(first + count for first, count in rows)
    return rows, max(1, longest) + draw(st.integers(0, 2))


def padded(
    rows: list[tuple[int, int]], room: int, seed: int
) -> tuple[torch.Tensor, Targets, torch.Tensor]:
    """Logits [N,S,V] with NaN as padding, targets of the rows, and bool [N,S]: their places."""
    held = torch.zeros(len(rows), room, dtype=torch.bool)
    for row, (first, count) in enumerate(rows):
        held[row, first : first + count] = True
    positions = int(held.sum())
    student = torch.full((len(rows), room, WIDTH), torch.nan, dtype=torch.float64)
    student[held] = normal(positions, WIDTH, seed=seed)
    targets = replace(
        targets_of(normal(positions, WIDTH, seed=seed + 1), k=5),
        valid=normal(positions, seed=seed + 2) > -2,
        row_offsets=torch.tensor([0, *(count for _, count in rows)]).cumsum(0),
        row_firsts=torch.tensor([first for first, _ in rows]),
    )
    return student, targets, held


class TestPaddedRows:
    @given(seeds, windows(), st.sampled_from(["none", "flat", "padded"]))
    def test_are_their_positions_and_padding_has_no_gradient(
        self, seed: int, drawn: tuple[list[tuple[int, int]], int], form: str
    ) -> None:
        student, targets, held = padded(*drawn, seed)
        weights = torch.where(held, normal(*held.shape, seed=seed + 3).abs(), torch.nan)
        flat_mask = None if form == "none" else weights[held]
        expected, wanted, counted = value_and_gradient(student[held], targets, flat_mask)

        loss, gradient, count = value_and_gradient(
            student, targets, weights if form == "padded" else flat_mask
        )

        assert torch.equal(loss, expected)
        assert torch.equal(count, counted)
        assert torch.equal(gradient[held], wanted)
        assert (gradient[~held] == 0).all()

    def test_start_at_the_front_where_nothing_else_is_said(self) -> None:
        student, targets, held = padded([(0, 3), (0, 1)], 4, seed=1)
        expected, _ = forward_kl(student[held], targets)

        assert torch.equal(forward_kl(student, replace(targets, row_firsts=None))[0], expected)

    def test_of_exactly_a_window_are_the_window(self) -> None:
        student, targets, _ = padded([(0, 3), (0, 3)], 3, seed=1)
        expected, _ = forward_kl(student, targets)

        windowed = replace(targets, row_firsts=torch.tensor([2, 5]))

        assert torch.equal(forward_kl(student, windowed)[0], expected)

    def test_make_no_array_of_the_size_of_the_logits_but_the_gradient(self) -> None:
        student = torch.zeros(2, 80, 40_000, requires_grad=True)
        targets = replace(
            targets_of(normal(150, 50, seed=1), k=5), row_offsets=torch.tensor([0, 80, 150])
        )
        with Sizes(student) as sizes:
            forward_kl(student, targets)[0].backward()

        assert sizes.larger_than(student.numel() / 4) == [student.numel()]

    @pytest.mark.parametrize("firsts", [None, torch.tensor([2, 0])])
    def test_that_reach_beyond_the_logits_are_refused(self, firsts: torch.Tensor | None) -> None:
        counts = (4, 2) if firsts is None else (2, 2)
        targets = replace(
            targets_of(normal(sum(counts), WIDTH, seed=1), k=5),
            row_offsets=torch.tensor([0, *counts]).cumsum(0),
            row_firsts=firsts,
        )
        with pytest.raises(
            PayloadInvalidError,
            match=rf"row 0 of 2 has {counts[0]} positions from {4 - counts[0]} on .* room for 3",
        ):
            forward_kl(torch.zeros(2, 3, WIDTH), targets)

    def test_take_no_mask_that_only_happens_to_have_as_many_numbers(self) -> None:
        student, targets, _ = padded([(0, 3), (0, 1)], 3, seed=1)
        with pytest.raises(PayloadInvalidError, match=r"mask has shape \(2, 2\) .* as \[2, 3\]"):
            forward_kl(student, targets, torch.ones(2, 2))


class TestRefusals:
    def test_of_something_else_than_targets_says_what_to_pass(self) -> None:
        logits, targets = torch.zeros(4, WIDTH), targets_of(normal(4, WIDTH, seed=1), k=5)
        for wrong in ((logits, object()), (targets, logits), (logits, logits)):
            with pytest.raises(PayloadInvalidError, match=r"pass payload\.targets as the second"):
                forward_kl(*wrong)

    def test_of_other_positions_than_the_targets_have(self) -> None:
        with pytest.raises(PayloadInvalidError, match=r"shape \(3, 30\) .* 4 positions"):
            forward_kl(torch.zeros(3, WIDTH), targets_of(normal(4, WIDTH, seed=1), k=5))

    def test_of_a_mask_of_another_size(self) -> None:
        with pytest.raises(PayloadInvalidError, match=r"mask has shape \(3,\) .* 4 positions"):
            forward_kl(
                torch.zeros(4, WIDTH), targets_of(normal(4, WIDTH, seed=1), k=5), torch.ones(3)
            )

    def test_of_an_id_that_the_student_has_no_column_for(self) -> None:
        targets = targets_of(normal(4, WIDTH, seed=1), k=WIDTH)
        with pytest.raises(PayloadInvalidError, match="name id 29 and the student has 29 columns"):
            forward_kl(torch.zeros(4, WIDTH - 1), targets)

    @pytest.mark.parametrize("k", [1, 5])
    def test_of_probabilities_that_are_no_logs_of_them(self, k: int) -> None:
        right = targets_of(normal(4, WIDTH, seed=1), k=k)
        wrong = replace(right, topk_logprobs=right.topk_logprobs.exp())
        with pytest.raises(PayloadInvalidError, match="neither probabilities nor logits") as told:
            forward_kl(torch.zeros(4, WIDTH), wrong)
        assert told.value.facts["wrong_positions"] == 4

    @pytest.mark.parametrize("wrong", [math.nan, math.inf])
    def test_of_log_probabilities_that_are_none_where_they_count(self, wrong: float) -> None:
        targets = targets_of(normal(4, WIDTH, seed=1), k=5)
        targets.topk_logprobs[2, 1] = wrong
        assert forward_kl(torch.zeros(4, WIDTH), targets, torch.tensor([1, 1, 0, 1]))[1] == 3
        with pytest.raises(PayloadInvalidError, match="at position 2"):
            forward_kl(torch.zeros(4, WIDTH), targets)

    def test_of_log_probabilities_are_none_for_rounding(self) -> None:
        targets = targets_of(normal(4, WIDTH, seed=1), k=5)
        for dtype in (torch.bfloat16, torch.float16):
            rounded = replace(targets, topk_logprobs=targets.topk_logprobs.to(dtype))
            assert forward_kl(torch.zeros(4, WIDTH), rounded)[0] > 0

    def test_of_weights_are_none_where_a_loss_is_linear_in_them(self) -> None:
        targets = targets_of(normal(4, WIDTH, seed=1), k=5)
        weights = replace(targets, topk_logprobs=targets.topk_logprobs + math.log(3))

        once, _ = soft_cross_entropy(torch.zeros(4, WIDTH), targets, tail=Tail.TRUNCATED)
        found, _ = soft_cross_entropy(torch.zeros(4, WIDTH), weights, tail=Tail.TRUNCATED)

        assert found == pytest.approx(3 * once)

    @pytest.mark.parametrize("offsets", [[0, 3], [1, 4], [0, 40], [0, 5, 4], [0]])
    def test_of_rows_that_are_not_made_of_the_positions(self, offsets: list[int]) -> None:
        targets = targets_of(normal(4, WIDTH, seed=1), k=5)
        wrong = replace(targets, row_offsets=torch.tensor(offsets))
        with pytest.raises(PayloadInvalidError, match="they go from 0 to 4 and never down"):
            forward_kl(torch.zeros(4, WIDTH), wrong)

    def test_of_another_temperature(self) -> None:
        targets = targets_of(normal(4, WIDTH, seed=1), k=5, temperature=2.0)
        assert forward_kl(torch.zeros(4, WIDTH), targets, temperature=2.0)[0] > 0
        with pytest.raises(PayloadInvalidError, match=r"temperature 1 is asked for .* are at 2"):
            forward_kl(torch.zeros(4, WIDTH), targets, temperature=1.0)


@pytest.mark.parametrize(
    ("logits", "says"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), "dense floats"),
        (torch.zeros(2, 5, dtype=torch.complex64), "dense floats"),
        (torch.zeros(2, 5).to_sparse(), "dense floats"),
        (torch.tensor(1.0), "shape"),
    ],
)
def test_logits_are_dense_floats(logits: torch.Tensor, says: str) -> None:
    with pytest.raises(PayloadInvalidError, match=says):
        forward_kl(logits, targets_of(torch.zeros(2, 5), k=3))


@pytest.mark.parametrize(
    "mask",
    [[True, True], torch.ones(2).numpy(), torch.ones(2) * 1j, torch.ones(2).to_sparse(), "x"],
)
def test_a_mask_is_a_dense_tensor(mask: torch.Tensor) -> None:
    with pytest.raises(PayloadInvalidError, match="the mask is a"):
        forward_kl(torch.zeros(2, 5), targets_of(torch.zeros(2, 5), k=3), mask)


class TestSamples:
    def sample(self, *, temperature: float = 1.0) -> Targets:
        """As good a sample as there is: every id, and the exact entropy."""
        whole = targets_of(normal(3, WIDTH, seed=1), k=WIDTH, temperature=temperature)
        entropy = -(whole.topk_logprobs.exp() * whole.topk_logprobs).sum(1)
        return replace(whole, sampled=True, entropy=entropy)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_of_all_there_is_are_the_distribution(self, temperature: float) -> None:
        student, sample = normal(3, WIDTH, seed=2), self.sample(temperature=temperature)
        weights = torch.tensor([0.5, 0.0, 3.0])

        loss, gradient, _ = value_and_gradient(student, sample, weights)

        plain = value_and_gradient(student, replace(sample, sampled=False), weights)
        assert torch.allclose(loss, plain[0], atol=1e-10)
        assert torch.allclose(gradient, plain[1], atol=1e-12)

    def test_left_out_add_nothing_whatever_their_entropy_holds(self) -> None:
        student, sample = normal(3, WIDTH, seed=2), self.sample()
        keep = torch.tensor([1.0, 0.0, 1.0])
        expected, _ = forward_kl(student, sample, keep)
        assert sample.entropy is not None
        sample.entropy[1] = math.nan

        assert forward_kl(student, sample, keep)[0] == expected

    @pytest.mark.parametrize("loss", [forward_kl, soft_cross_entropy])
    @pytest.mark.parametrize("entropy", ["exact", "none"])
    def test_do_not_hide_a_nan_that_counts(self, loss: Loss, entropy: str) -> None:
        sample = self.sample()
        sample.topk_logprobs[1, 4] = math.nan
        if entropy == "none":
            sample = replace(sample, entropy=None)

        assert loss(normal(3, WIDTH, seed=2), sample)[0].isnan()


def test_a_skew_that_is_lost_in_one_is_the_divergence_without_it() -> None:
    logits, targets = torch.arange(10.0).view(2, 5), targets_of(torch.zeros(2, 5), k=3)
    skewed, _ = skew_reverse_kl(logits, targets, alpha=1e-30)
    assert skewed == pytest.approx(reverse_kl(logits, targets)[0])


def test_losses_import_no_transport() -> None:
    program = """
import sys
import teacher_logits_client.losses
print(sorted({"grpc", "google.protobuf", "teacher_logits.v1", "ray"} & set(sys.modules)))
"""
    printed = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )

    assert printed.stdout.strip() == "[]"


def test_rows_of_padding_behind_the_others_may_be_left_out_of_the_logits() -> None:
    targets = make_targets(
        {
            ColumnKind.TOPK_IDS: torch.tensor([[1], [2], [0]], dtype=torch.int32),
            ColumnKind.TOPK_LOGPROBS: torch.full((3, 1), -0.5),
            ColumnKind.LOG_TAIL: torch.full((3, 1), -0.93),
            ColumnKind.ROW_OFFSETS: torch.tensor([0, 3, 3, 3]),
        }
    )
    logits = torch.randn(3, 5, 8)
    whole = forward_kl(logits, targets)
    for rows in (1, 2):
        cut = forward_kl(logits[:rows], targets)
        assert torch.equal(cut[0], whole[0])
        assert torch.equal(cut[1], whole[1])
    with pytest.raises(PayloadInvalidError, match="positions"):
        forward_kl(logits[:0], targets)


@pytest.mark.parametrize("wrong", [-100, -1, 2, 523, float("nan"), -0.5])
def test_a_mask_of_labels_or_worse_is_refused(wrong: float) -> None:
    targets = make_targets(
        {
            ColumnKind.TOPK_IDS: torch.tensor([[1], [2]], dtype=torch.int32),
            ColumnKind.TOPK_LOGPROBS: torch.full((2, 1), -0.5),
            ColumnKind.LOG_TAIL: torch.full((2, 1), -0.93),
            ColumnKind.ROW_OFFSETS: torch.tensor([0, 2]),
        }
    )
    with pytest.raises(PayloadInvalidError, match=r"at position 1 .* labels_mask"):
        forward_kl(torch.randn(2, 8), targets, torch.tensor([1, wrong]))
