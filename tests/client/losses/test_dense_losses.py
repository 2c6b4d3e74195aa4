"""Losses against dense teacher logits: their definition, their tiles, their bins."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.losses.losses_by_definition import Loss, normal, targets_of
from tests.client.targets.made_arrays import Sizes
from torch.utils._python_dispatch import TorchDispatchMode

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.losses import dense_forward_kl, dense_soft_cross_entropy, forward_kl
from teacher_logits_client.normalisation import StepLoss, StepNormaliser

LOSSES: tuple[Loss, ...] = (dense_soft_cross_entropy, dense_forward_kl)
WIDTH = 11
each_loss = pytest.mark.parametrize("loss", LOSSES)


def by_definition(
    loss: Loss, student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Each position's loss [P], times T², by plain autograd."""
    log_p, log_q = ((x.double() / temperature).log_softmax(-1) for x in (teacher, student))
    terms = -log_q if loss is dense_soft_cross_entropy else log_p - log_q
    return torch.where(log_p > -torch.inf, log_p.exp() * terms, 0.0).sum(-1) * temperature**2


def value_and_gradient(
    loss: Loss, student: torch.Tensor, *arguments: object, **settings: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    leaf = student.detach().clone().requires_grad_()
    sums, counts = loss(leaf, *arguments, **settings)
    (sums * torch.arange(1, sums.numel() + 1).reshape(sums.shape)).sum().backward()
    assert leaf.grad is not None
    return sums.detach(), counts, leaf.grad


@dataclass(frozen=True, kw_only=True)
class Drawn:
    student: torch.Tensor
    teacher: torch.Tensor
    weights: torch.Tensor
    bin_ids: torch.Tensor
    bins: int
    tile: int
    temperature: float


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    count, columns = draw(st.integers(0, 6)), draw(st.integers(1, WIDTH))
    seed, scale = draw(st.integers(0, 2**32)), draw(st.sampled_from([0.1, 3.0, 300.0]))
    bins = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(seed)
    teacher = normal(count, columns, seed=seed, scale=scale)
    # Columns that the teacher rules out, but never all of a row.
    out = torch.rand(count, columns, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    out[:, 0] = False
    return Drawn(
        student=normal(count, columns, seed=seed + 1, scale=scale),
        teacher=teacher.masked_fill(out, -torch.inf),
        weights=normal(count, seed=seed + 2).clamp_min(0),
        bin_ids=torch.randint(0, bins, (count,), generator=generator),
        bins=bins,
        tile=draw(st.integers(1, columns)),
        temperature=draw(st.sampled_from([1.0, 0.5, 2.0])),
    )


class TestDefinition:
    @settings(max_examples=100)
    @given(case=drawn(), which=st.sampled_from([0, 1]))
    def test_is_that_of_plain_autograd_bin_by_bin(self, case: Drawn, which: int) -> None:
        loss, leaf = LOSSES[which], case.student.clone().requires_grad_()
        each = by_definition(loss, leaf, case.teacher, case.temperature) * case.weights
        in_bins = [case.bin_ids == number for number in range(case.bins)]
        wanted = torch.stack([each[own].sum() for own in in_bins])
        (wanted * torch.arange(1, case.bins + 1)).sum().backward()

        sums, counts, gradient = value_and_gradient(
            loss,
            case.student,
            case.teacher,
            case.weights,
            bin_ids=case.bin_ids,
            bins=case.bins,
            tile=case.tile,
            temperature=case.temperature,
        )

        assert torch.allclose(sums, wanted, rtol=1e-10, atol=1e-10)
        assert torch.allclose(counts, torch.stack([case.weights[own].sum() for own in in_bins]))
        assert leaf.grad is not None
        assert torch.allclose(gradient, leaf.grad, rtol=1e-10, atol=1e-10)

    @each_loss
    @pytest.mark.parametrize("tile", [2, 9])
    def test_gradient_is_what_finite_differences_say(self, loss: Loss, tile: int) -> None:
        teacher, bins = normal(4, 9, seed=1), torch.tensor([0, 1, 1, 0])
        weights = torch.tensor([0.25, 0.0, 3.0, 1.0])

        assert torch.autograd.gradcheck(
            lambda z: loss(z, teacher, weights, bin_ids=bins, bins=2, temperature=2.0, tile=tile)[
                0
            ],
            (normal(4, 9, seed=2).requires_grad_(),),
        )

    def test_is_the_sparse_loss_of_targets_that_name_every_id(self) -> None:
        student, teacher = normal(4, WIDTH, seed=1), normal(4, WIDTH, seed=2)
        expected, _ = forward_kl(student, targets_of(teacher, k=WIDTH))

        assert torch.allclose(dense_forward_kl(student, teacher)[0], expected, atol=1e-12)

    def test_of_kl_is_at_rest_where_the_student_is_the_teacher(self) -> None:
        teacher = normal(4, WIDTH, seed=3)

        sums, _, gradient = value_and_gradient(dense_forward_kl, teacher, teacher, tile=3)

        assert abs(float(sums)) < 1e-12
        assert gradient.abs().max() < 1e-15


@each_loss
class TestForms:
    def test_of_rows_are_those_of_their_positions(self, loss: Loss) -> None:
        student, teacher = normal(2, 3, WIDTH, seed=1), normal(2, 3, WIDTH, seed=2)
        mask, bins = torch.tensor([[1, 1, 0], [0, 1, 1]]), torch.tensor([[0, 1, 0], [1, 0, 1]])
        flat = value_and_gradient(
            loss,
            student.flatten(0, 1),
            teacher.flatten(0, 1),
            mask.flatten(),
            bin_ids=bins.flatten(),
            bins=2,
        )

        found = value_and_gradient(loss, student, teacher, mask, bin_ids=bins, bins=2)

        assert torch.equal(found[0], flat[0])
        assert found[1].tolist() == flat[1].tolist() == [2, 2]
        assert torch.equal(found[2].flatten(0, 1), flat[2])

    def test_without_bins_are_scalars(self, loss: Loss) -> None:
        sums, counts = loss(normal(3, WIDTH, seed=1), normal(3, WIDTH, seed=2))

        assert sums.shape == counts.shape == ()
        assert int(counts) == 3

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_are_computed_in_fp32_with_the_gradient_in_the_type_of_the_logits(
        self, loss: Loss, dtype: torch.dtype
    ) -> None:
        student, teacher = normal(6, 40, seed=3).to(dtype), normal(6, 40, seed=4).to(dtype)
        exact, _, wanted = value_and_gradient(loss, student.double(), teacher)

        sums, _, gradient = value_and_gradient(loss, student, teacher, tile=16)

        assert sums.dtype == torch.float32
        assert gradient.dtype == dtype
        assert torch.allclose(sums.double(), exact, rtol=1e-5)
        assert torch.allclose(gradient.double(), wanted, atol=1e-6, rtol=torch.finfo(dtype).eps)

    def test_leave_the_teacher_without_a_gradient(self, loss: Loss) -> None:
        teacher = normal(3, WIDTH, seed=1).requires_grad_()

        loss(normal(3, WIDTH, seed=2).requires_grad_(), teacher)[0].backward()

        assert teacher.grad is None

    def test_of_logits_in_any_order_of_memory_are_the_same(self, loss: Loss) -> None:
        student, teacher = normal(3, WIDTH, seed=1), normal(3, WIDTH, seed=2)
        expected, _, wanted = value_and_gradient(loss, student, teacher)
        leaf = student.T.contiguous().requires_grad_()

        sums, _ = loss(leaf.T, teacher.T.contiguous().T)
        sums.backward()

        assert torch.allclose(sums, expected)
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad.T, wanted)


@each_loss
class TestWhatIsLeftOut:
    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("tile", [4, 8192])
    def test_adds_exactly_nothing(self, loss: Loss, garbage: float, tile: int) -> None:
        student, teacher = normal(5, WIDTH, seed=7), normal(5, WIDTH, seed=8)
        keep, bins = torch.tensor([True, False, True, True, False]), torch.tensor([0, -9, 1, 0, 5])
        expected, _, wanted = value_and_gradient(
            loss, student[keep], teacher[keep], bin_ids=bins[keep], bins=2, tile=tile
        )
        student[~keep] = garbage
        teacher[~keep] = garbage

        sums, counts, gradient = value_and_gradient(
            loss, student, teacher, keep, bin_ids=bins, bins=2, tile=tile
        )

        assert torch.equal(sums, expected)
        assert counts.tolist() == [2, 1]
        assert torch.equal(gradient[keep], wanted)
        assert not gradient[~keep].any()

    def test_may_be_all_of_it(self, loss: Loss) -> None:
        nothing = torch.full((3, WIDTH), math.nan)

        sums, counts, gradient = value_and_gradient(loss, nothing, nothing, torch.zeros(3))

        assert float(sums) == float(counts) == 0
        assert not gradient.any()

    def test_is_no_nan_of_the_student_that_counts(self, loss: Loss) -> None:
        student, teacher = normal(2, WIDTH, seed=1), normal(2, WIDTH, seed=2)
        student[1, 4] = math.nan

        assert loss(student, teacher, tile=3)[0].isnan()

    @pytest.mark.parametrize("tile", [3, 8192])
    @pytest.mark.parametrize("wrong", [math.nan, math.inf])
    def test_is_no_teacher_without_a_distribution(
        self, loss: Loss, wrong: float, tile: int
    ) -> None:
        student, teacher = normal(4, WIDTH, seed=1), normal(4, WIDTH, seed=2)
        teacher[2, 4], teacher[3] = wrong, -math.inf
        mask = torch.tensor([False, True, True, True])

        with pytest.raises(PayloadInvalidError, match="teacher logits at position 2") as refused:
            loss(student, teacher, mask, tile=tile)

        assert refused.value.facts == {"position": 2, "wrong_positions": 2}

    def test_by_the_student_is_infinite_with_a_finite_gradient(self, loss: Loss) -> None:
        student, teacher = normal(2, WIDTH, seed=3), normal(2, WIDTH, seed=4)
        student[0, 2] = -torch.inf

        sums, _, gradient = value_and_gradient(loss, student, teacher, tile=2)

        assert float(sums) == math.inf
        assert gradient.isfinite().all()

    def test_by_both_costs_nothing(self, loss: Loss) -> None:
        student, teacher = normal(2, WIDTH, seed=3), normal(2, WIDTH, seed=4)
        expected, _, wanted = value_and_gradient(loss, student, teacher)
        ruled_out = torch.full((2, 3), -torch.inf, dtype=torch.float64)
        for order in ((0, 1), (1, 0)):
            wide = [
                torch.cat([(each, ruled_out)[i] for i in order], 1) for each in (student, teacher)
            ]

            sums, _, gradient = value_and_gradient(loss, *wide, tile=3)

            assert torch.allclose(sums, expected, atol=1e-12)
            own = gradient[:, 3:] if order[0] else gradient[:, :-3]
            assert torch.allclose(own, wanted, atol=1e-12)


class _Names(TorchDispatchMode):
    """Keeps the names of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(str(func.overloadpacket).removesuffix("_"))
        return func(*args, **(kwargs or {}))


@each_loss
class TestTiles:
    def test_make_the_gradient_the_only_array_of_the_size_of_the_logits(self, loss: Loss) -> None:
        student, teacher = torch.zeros(300, 20_000, requires_grad=True), torch.zeros(300, 20_000)
        with Sizes(student, teacher) as sizes:
            loss(student, teacher, torch.arange(300) % 5 != 4)[0].backward()

        assert sizes.larger_than(student.numel() / 8) == [student.numel()]

    @pytest.mark.parametrize(("tile", "again"), [(WIDTH, False), (WIDTH - 1, True)])
    def test_compute_the_softmax_again_unless_one_holds_all(
        self, loss: Loss, tile: int, again: bool
    ) -> None:
        leaf = normal(3, WIDTH, seed=1).requires_grad_()
        sums, _ = loss(leaf, normal(3, WIDTH, seed=2), tile=tile)
        with _Names() as operations:
            sums.backward()

        assert ("aten.exp2" in operations.names) is again


class TestInASplitStep:
    @settings(max_examples=20)
    @given(case=drawn(), cut=st.integers(0, 6))
    def test_bins_weigh_and_divide_as_in_one_batch(self, case: Drawn, cut: int) -> None:
        weights = [1.0, 0.25, 0.5][: case.bins]
        results = []
        for cuts in ((slice(None),), (slice(cut), slice(cut, None))):
            leaf = case.student.clone().requires_grad_()
            normaliser = StepNormaliser(StepLoss(parameters=[leaf], bin_weights=weights))
            with normaliser.begin(step=0) as step:
                for number, own in enumerate(cuts):
                    sums, counts = dense_soft_cross_entropy(
                        leaf[own],
                        case.teacher[own],
                        case.weights[own],
                        bin_ids=case.bin_ids[own],
                        bins=case.bins,
                        tile=case.tile,
                    )
                    step.microbatch(number, sums, counts).backward()
                results.append((step.finish(), leaf.grad))

        (whole, wanted), (split, gradient) = results
        assert split.loss == pytest.approx(whole.loss, rel=1e-12)
        assert wanted is not None
        assert gradient is not None
        assert torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-12)


@each_loss
class TestRefusals:
    @pytest.mark.parametrize("wrong", [-1, 2, 7])
    def test_name_a_bin_that_there_is_none_of(self, loss: Loss, wrong: int) -> None:
        both = normal(3, WIDTH, seed=1), normal(3, WIDTH, seed=2)
        with pytest.raises(PayloadInvalidError, match=rf"{wrong} at position 1 .* 2 bins, 0 to 1"):
            loss(*both, bin_ids=torch.tensor([0, wrong, wrong]), bins=2)

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"bins": 2}, "2 bins and no bin_ids"),
            ({"bins": 0}, "bins is 0"),
            ({"bin_ids": torch.tensor([0, 1, 2])}, r"there is 1 bin, 0: .* with bins="),
            ({"tile": 0.5}, "tile is 0.5"),
            ({"temperature": 0.0}, "temperature is 0.0"),
            ({"temperature": math.nan}, "temperature is nan"),
            ({"temperature": "2"}, "temperature is '2'"),
            ({"bin_ids": torch.zeros(3)}, "bin_ids is a torch.float32"),
            ({"bin_ids": [0, 0, 0]}, "bin_ids is a list"),
            ({"bin_ids": torch.zeros(4, dtype=torch.int64)}, r"bin_ids has shape \(4,\)"),
            ({"mask": torch.ones(4)}, r"the mask has shape \(4,\)"),
            ({"mask": [1, 1, 1]}, "the mask is a list"),
            ({"mask": torch.tensor([1, -100, 1])}, "labels_mask"),
        ],
    )
    def test_name_the_setting(self, loss: Loss, settings: dict[str, object], says: str) -> None:
        with pytest.raises(PayloadInvalidError, match=says):
            loss(normal(3, WIDTH, seed=1), normal(3, WIDTH, seed=2), **settings)

    @pytest.mark.parametrize(
        ("student", "teacher", "says"),
        [
            (torch.zeros(3, 5), torch.zeros(3, 6), r"shape \(3, 5\) .* \(3, 6\)"),
            (torch.zeros(3, 5), torch.zeros(15), r"teacher logits have shape \(15,\)"),
            (torch.zeros(3, 5), None, "teacher logits are a NoneType"),
            (torch.zeros(3, 5).long(), torch.zeros(3, 5), "student logits are a torch.int64"),
            (torch.zeros(3, 5).to_sparse(), torch.zeros(3, 5), "give dense ones"),
        ],
    )
    def test_name_the_logits(
        self, loss: Loss, student: torch.Tensor, teacher: torch.Tensor, says: str
    ) -> None:
        with pytest.raises(PayloadInvalidError, match=says):
            loss(student, teacher)
