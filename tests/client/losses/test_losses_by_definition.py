"""Every loss on every tail: value and gradient by definition, and what may not disturb them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.losses.losses_by_definition import (
    ALL,
    BUCKETS,
    REFUSED,
    Loss,
    by_definition,
    loss_of,
    mse_by_definition,
    normal,
    targets_of,
)

from teacher_logits.errors import ConfigError, PayloadInvalidError
from teacher_logits_client import losses
from teacher_logits_client.losses import Tail

if TYPE_CHECKING:
    from teacher_logits_client.targets import Targets

WIDTH = 12
DIVERGENCES = [name for name, _ in BUCKETS if name != "soft_cross_entropy"]

each_loss = pytest.mark.parametrize(("name", "tail"), ALL, ids=[f"{n}-{t.value}" for n, t in ALL])
seeds = st.integers(0, 2**32)
temperatures = st.sampled_from([1.0, 0.5, 2.0])


def value_and_gradient(
    name: str,
    tail: Tail,
    student: torch.Tensor,
    targets: Targets,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    leaf = student.detach().clone().requires_grad_()
    loss, count = loss_of(name, tail)(leaf, targets, mask)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, count


def expected_of(
    name: str, tail: Tail, student: torch.Tensor, targets: Targets, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = student.double().clone().requires_grad_()
    loss = (by_definition(name, tail, leaf, targets) * weights).sum()
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@st.composite
def drawn(draw: st.DrawFn) -> tuple[torch.Tensor, Targets, torch.Tensor]:
    """A student [P,V], targets of K entries or fewer, and weights [P], some of them 0."""
    count, columns = draw(st.integers(1, 5)), draw(st.integers(2, WIDTH))
    seed, scale = draw(seeds), draw(st.sampled_from([0.1, 2.0, 6.0]))
    k = draw(st.integers(2, columns))
    teacher, student = (normal(count, columns, seed=seed + n, scale=scale) for n in (0, 1))
    targets = targets_of(
        teacher, k=k, temperature=draw(temperatures), width=k + draw(st.integers(0, 3))
    )
    return student, targets, normal(count, seed=seed + 2).clamp_min(0)


class TestDefinition:
    @pytest.mark.parametrize("tail", Tail)
    @given(st.data(), drawn())
    @settings(max_examples=50)
    def test_is_that_of_plain_autograd_over_all_columns(
        self, tail: Tail, data: st.DataObject, case: tuple[torch.Tensor, Targets, torch.Tensor]
    ) -> None:
        pair = data.draw(st.sampled_from([pair for pair in ALL if pair[1] is tail]))
        student, targets, weights = case
        expected, wanted = expected_of(*pair, student, targets, weights)

        loss, gradient, count = value_and_gradient(*pair, student, targets, weights)

        assert torch.allclose(loss, expected, atol=1e-9, rtol=1e-9)
        assert torch.allclose(gradient, wanted, atol=1e-9, rtol=1e-9)
        assert torch.allclose(count, weights.sum())

    @given(seeds, st.integers(1, WIDTH), st.integers(0, 3), temperatures)
    def test_of_the_squared_error_is_a_mean_over_the_entries_that_there_are(
        self, seed: int, k: int, spare: int, temperature: float
    ) -> None:
        teacher, student = normal(3, WIDTH, seed=seed), normal(3, WIDTH, seed=seed + 1)
        targets = targets_of(teacher, k=k, temperature=temperature, width=k + spare)
        leaf, other = (student.clone().requires_grad_() for _ in range(2))
        expected = mse_by_definition(other, targets).sum()
        expected.backward()

        loss, count = losses.logprob_mse(leaf, targets)
        loss.backward()

        assert torch.allclose(loss, expected, atol=1e-9)
        assert leaf.grad is not None
        assert other.grad is not None
        assert torch.allclose(leaf.grad, other.grad, atol=1e-9)
        assert int(count) == 3

    @each_loss
    @pytest.mark.parametrize("k", [3, 7])
    def test_gradient_is_what_finite_differences_say(self, name: str, tail: Tail, k: int) -> None:
        targets = targets_of(normal(2, 7, seed=1), k=k, temperature=2.0, width=k + 1)
        student = normal(2, 7, seed=2).requires_grad_()
        weights = torch.tensor([0.25, 3.0])

        assert torch.autograd.gradcheck(
            lambda z: 0.7 * loss_of(name, tail)(z, targets, weights)[0], (student,)
        )

    def test_gradient_of_the_squared_error_is_what_finite_differences_say(self) -> None:
        targets = targets_of(normal(2, 7, seed=1), k=3, temperature=2.0, width=4)

        assert torch.autograd.gradcheck(
            lambda z: losses.logprob_mse(z, targets)[0], (normal(2, 7, seed=2).requires_grad_(),)
        )


class TestBuckets:
    @given(st.sampled_from(DIVERGENCES), seeds, st.integers(1, WIDTH - 1))
    def test_lie_between_zero_and_the_dense_divergence(self, name: str, seed: int, k: int) -> None:
        teacher, student = normal(4, WIDTH, seed=seed), normal(4, WIDTH, seed=seed + 1)
        dense, _ = loss_of(name, Tail.BUCKET)(student, targets_of(teacher, k=WIDTH))

        loss, _ = loss_of(name, Tail.BUCKET)(student, targets_of(teacher, k=k))

        assert -1e-12 <= float(loss) <= float(dense) + 1e-12

    @given(st.sampled_from(BUCKETS), seeds, st.integers(1, WIDTH), temperatures)
    def test_are_at_rest_where_the_student_is_the_teacher(
        self, pair: tuple[str, Tail], seed: int, k: int, temperature: float
    ) -> None:
        teacher = normal(3, WIDTH, seed=seed)
        targets = targets_of(teacher, k=k, temperature=temperature)

        loss, gradient, _ = value_and_gradient(*pair, teacher, targets)

        if pair[0] in DIVERGENCES:
            assert abs(float(loss)) < 1e-12
        if pair[0] != "total_variation":  # which has a kink there
            assert gradient.abs().max() < 1e-12

    @pytest.mark.parametrize("name", [name for name, _ in BUCKETS])
    @pytest.mark.parametrize("outside", [1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8])
    def test_have_an_exact_gradient_in_fp32_however_small_the_students_tail(
        self, name: str, outside: float
    ) -> None:
        teacher, student = normal(2, 4096, seed=1, scale=1.0), normal(2, 4096, seed=2, scale=1.0)
        ids = teacher.topk(8, dim=1).indices
        teacher, student = (
            with_mass_outside(logits, ids, mass)
            for logits, mass in ((teacher, 0.05), (student, outside))
        )
        student = student.float()
        targets = targets_of(teacher, k=8)
        _, exact = expected_of(name, Tail.BUCKET, student, targets, torch.ones(2))

        _, gradient, _ = value_and_gradient(name, Tail.BUCKET, student, targets)

        assert float((gradient - exact).norm() / exact.norm()) <= 1e-5
        # And by itself, where the whole gradient's norm would hide it.
        tails = (each.double().scatter(1, ids, 0.0) for each in (gradient, exact))
        got, wanted = tails
        assert float((got - wanted).norm() / wanted.norm()) <= 1e-4


def with_mass_outside(logits: torch.Tensor, ids: torch.Tensor, mass: float) -> torch.Tensor:
    """Move the logits at ``ids`` so that the others have ``mass``."""
    outside = logits.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    inside = logits.gather(1, ids)
    wanted = outside + math.log((1 - mass) / mass)
    return logits.scatter(1, ids, inside - inside.logsumexp(1, keepdim=True) + wanted)


@each_loss
class TestEveryLoss:
    def test_leaves_out_rows_that_do_not_count_whatever_they_hold(
        self, name: str, tail: Tail
    ) -> None:
        student = torch.full((3, WIDTH), math.nan)
        targets = targets_of(normal(3, WIDTH, seed=1), k=4)

        loss, gradient, count = value_and_gradient(name, tail, student, targets, torch.zeros(3))

        assert float(loss) == float(count) == 0
        assert (gradient == 0).all()

    def test_computes_in_fp32_and_gives_the_gradient_in_the_type_of_the_logits(
        self, name: str, tail: Tail
    ) -> None:
        targets = targets_of(normal(4, WIDTH, seed=2), k=4)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            student = normal(4, WIDTH, seed=3).to(dtype)
            exact_loss, exact, _ = value_and_gradient(name, tail, student.double(), targets)

            loss, gradient, _ = value_and_gradient(name, tail, student, targets)

            assert loss.dtype == torch.float32
            assert gradient.dtype == dtype
            assert torch.allclose(loss.double(), exact_loss, rtol=1e-5)
            step = torch.finfo(dtype).eps
            assert torch.allclose(gradient.double(), exact, atol=2e-5, rtol=step)

    def test_takes_minus_infinity_for_what_is_absent(self, name: str, tail: Tail) -> None:
        """In the last column as well: entries and tails of a payload, and of targets by hand."""
        teacher = torch.full((2, WIDTH), -torch.inf, dtype=torch.float64)
        teacher[0, [0, 3, 7]] = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
        teacher[1, [0, 5]] = 1.0
        absent = targets_of(teacher, k=4)
        written = replace(
            absent,
            topk_logprobs=absent.topk_logprobs.masked_fill(~absent.present, -torch.inf),
            log_tail=torch.full((2,), -torch.inf, dtype=torch.float64),
        )
        ruled_out = torch.tensor([8, 9, 10, 11], dtype=torch.int32)
        named = replace(written, topk_ids=absent.topk_ids.where(absent.present, ruled_out))
        student = normal(2, WIDTH, seed=4)
        student[:, [1, 2, 4, 6, 8, 9, 10, 11]] = -torch.inf
        expected, wanted, _ = value_and_gradient(name, tail, student, absent)

        assert wanted.isfinite().all()
        assert wanted.any()
        for each in (written, named):
            loss, gradient, _ = value_and_gradient(name, tail, student, each)
            assert torch.equal(loss, expected)
            assert torch.equal(gradient, wanted)

    def test_has_a_finite_gradient_whatever_either_side_rules_out(
        self, name: str, tail: Tail
    ) -> None:
        teacher = normal(4, WIDTH, seed=5)
        teacher[2, 3:] = -torch.inf
        targets, student = targets_of(teacher, k=4), normal(4, WIDTH, seed=6)
        student[0, int(targets.topk_ids[0, 0])] = -torch.inf
        student[1] = -torch.inf
        student[1, targets.topk_ids[1].long()] = 1.0
        student[3, targets.topk_ids[3].long()] = -torch.inf

        loss, gradient, _ = value_and_gradient(name, tail, student, targets)

        assert not loss.isnan()
        assert gradient.isfinite().all()

    def test_does_not_hide_a_nan_among_the_ids(self, name: str, tail: Tail) -> None:
        targets, student = targets_of(normal(2, WIDTH, seed=7), k=4), normal(2, WIDTH, seed=8)
        student[1, int(targets.topk_ids[1, 2])] = math.nan

        assert loss_of(name, tail)(student, targets)[0].isnan()

    def test_takes_logits_in_any_order_of_memory(self, name: str, tail: Tail) -> None:
        targets, student = targets_of(normal(3, WIDTH, seed=9), k=4), normal(3, WIDTH, seed=10)
        expected, wanted, _ = value_and_gradient(name, tail, student, targets)
        leaf = student.T.contiguous().requires_grad_()

        loss, _ = loss_of(name, tail)(leaf.T, targets)
        loss.backward()

        assert torch.allclose(loss, expected)
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad.T, wanted)


class TestWhatIsInfinite:
    def test_reverse_kl_is_where_the_teacher_rules_out_what_the_student_does_not(self) -> None:
        teacher = normal(1, WIDTH, seed=1)
        teacher[0, 3:] = -torch.inf

        loss, _ = losses.reverse_kl(normal(1, WIDTH, seed=2), targets_of(teacher, k=4))

        assert float(loss) == math.inf

    def test_jsd_skews_and_total_variation_never_are(self) -> None:
        teacher = normal(1, WIDTH, seed=1)
        teacher[0, 3:] = -torch.inf
        student = normal(1, WIDTH, seed=2)
        student[0, :3] = -torch.inf
        targets = targets_of(teacher, k=4)

        for loss, most in (
            (losses.generalised_jsd, math.log(2)),
            (losses.skew_kl, -math.log(0.1)),
            (losses.skew_reverse_kl, -math.log(0.1)),
            (losses.total_variation, 1.0),
        ):
            assert float(loss(student, targets)[0]) == pytest.approx(most)


class TestNothingKept:
    """A position that counts and has no entry: everything is in the teacher's tail."""

    @each_loss
    def test_is_no_nan(self, name: str, tail: Tail) -> None:
        targets = targets_of(normal(2, WIDTH, seed=3), k=4)
        empty = torch.tensor([[False], [True]])
        targets = replace(
            targets,
            topk_ids=targets.topk_ids.masked_fill(empty, -1),
            topk_logprobs=targets.topk_logprobs.masked_fill(empty, -1e4),
            log_tail=targets.log_tail.masked_fill(empty.squeeze(1), 0.0),
        )

        loss, gradient, _ = value_and_gradient(name, tail, normal(2, WIDTH, seed=4), targets)

        assert not loss.isnan()
        assert gradient[0].any()
        assert gradient[1].abs().max() < 1e-12 or tail is Tail.NEMO_FLOOR


class TestSwitches:
    """At the ends of their shares the losses are the plain ones, as TRL, Liger and GKD have it."""

    @pytest.mark.parametrize(("beta", "plain"), [(0, losses.forward_kl), (1, losses.reverse_kl)])
    def test_of_the_jsd_are_kept(self, beta: float, plain: Loss) -> None:
        targets, student = targets_of(normal(3, WIDTH, seed=1), k=4), normal(3, WIDTH, seed=2)

        loss, _ = losses.generalised_jsd(student, targets, beta=beta)

        assert torch.equal(loss, plain(student, targets)[0])

    def test_of_the_jsd_are_no_limits_of_it(self) -> None:
        targets, student = targets_of(normal(3, WIDTH, seed=1), k=4), normal(3, WIDTH, seed=2)
        near, plain = (losses.generalised_jsd(student, targets, beta=b)[0] for b in (1e-6, 0))

        assert float(near) == pytest.approx(1e-6 * float(plain), rel=1e-3)

    def test_of_the_skews_are_their_limits(self) -> None:
        targets, student = targets_of(normal(3, WIDTH, seed=1), k=4), normal(3, WIDTH, seed=2)
        for skew, plain in (
            (losses.skew_kl, losses.forward_kl),
            (losses.skew_reverse_kl, losses.reverse_kl),
        ):
            expected = plain(student, targets)[0]
            assert torch.equal(skew(student, targets, alpha=0)[0], expected)
            assert torch.allclose(skew(student, targets, alpha=1e-9)[0], expected, rtol=1e-5)

    @pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan, "0.5"])
    def test_beyond_the_ends_are_refused(self, beta: float) -> None:
        targets = targets_of(normal(3, WIDTH, seed=1), k=4)
        with pytest.raises(ConfigError, match=r"beta is .*; give a number from 0 to 1"):
            losses.generalised_jsd(torch.zeros(3, WIDTH), targets, beta=beta)

    @pytest.mark.parametrize("skew", [losses.skew_kl, losses.skew_reverse_kl])
    def test_where_a_skew_is_zero_are_refused(self, skew: Loss) -> None:
        targets = targets_of(normal(3, WIDTH, seed=1), k=4)
        with pytest.raises(ConfigError, match=r"alpha is 1; give a number from 0 to below 1"):
            skew(torch.zeros(3, WIDTH), targets, alpha=1)


class TestTailsRefused:
    @pytest.mark.parametrize("name", [name for name, _ in BUCKETS])
    def test_where_both_sides_renormalised_on_one_id_teach_nothing(self, name: str) -> None:
        targets = targets_of(normal(3, WIDTH, seed=1), k=1)
        with pytest.raises(PayloadInvalidError, match=r"K = 1, .*top_k of at least 2, or take"):
            loss_of(name, Tail.RENORMALISED)(torch.zeros(3, WIDTH), targets)
        assert loss_of(name, Tail.BUCKET)(torch.zeros(3, WIDTH), targets)[0] > 0

    @pytest.mark.parametrize(("name", "tail"), REFUSED)
    def test_where_they_are_infinite_or_another_by_a_second_name(
        self, name: str, tail: Tail
    ) -> None:
        targets = targets_of(normal(3, WIDTH, seed=1), k=4)
        with pytest.raises(ConfigError, match="take Tail"):
            loss_of(name, tail)(torch.zeros(3, WIDTH), targets)

    def test_where_they_are_none(self) -> None:
        targets = targets_of(normal(3, WIDTH, seed=1), k=4)
        with pytest.raises(ConfigError, match=r"tail is 'bucket', a str: .*Tail\.BUCKET"):
            losses.forward_kl(torch.zeros(3, WIDTH), targets, tail="bucket")  # type: ignore[arg-type]
