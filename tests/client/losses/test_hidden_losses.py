"""Losses straight from hidden states: those of logits that are never made, in every way."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.losses.losses_by_definition import ALL, by_definition, loss_of, normal, targets_of
from torch.utils._python_dispatch import TorchDispatchMode

from teacher_logits.errors import ConfigError, PayloadInvalidError
from teacher_logits_client import losses
from teacher_logits_client.losses import Tail, products, tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from teacher_logits_client.targets import Targets

each_loss = pytest.mark.parametrize(("name", "tail"), ALL, ids=[f"{n}-{t.value}" for n, t in ALL])
seeds = st.integers(0, 2**32)


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head and its hidden states, in float64."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None

    def leaves(self) -> list[torch.Tensor]:
        given = [self.hidden, self.weight] + ([] if self.bias is None else [self.bias])
        return [each.detach().clone().requires_grad_() for each in given]

    def dense(self, *leaves: torch.Tensor) -> torch.Tensor:
        logits = self.scale * torch.nn.functional.linear(*leaves)
        cap = self.soft_cap
        return logits if cap is None else cap * (logits / cap).tanh()

    def tiled(self, *leaves: torch.Tensor) -> losses.HeadLogits:
        return losses.from_hidden(*leaves, scale=self.scale, soft_cap=self.soft_cap)


def head_of(
    count: int,
    columns: int,
    *,
    width: int = 5,
    seed: int = 1,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Head:
    return Head(
        hidden=normal(count, width, seed=seed),
        weight=normal(columns, width, seed=seed + 1, scale=1.0),
        bias=normal(columns, seed=seed + 2),
        scale=scale,
        soft_cap=soft_cap,
    )


def small_tiles(at_once: pytest.MonkeyPatch, positions: int, columns: int) -> None:
    at_once.setattr(tiles, "_CPU_POSITIONS", positions)
    at_once.setattr(tiles, "_CPU_LOGITS", positions * columns)


@pytest.fixture
def tiny_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as at_once:
        small_tiles(at_once, 3, 4)
        yield


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Head, Targets, torch.Tensor, tuple[int, int]]:
    """A head, targets of K entries or fewer, weights of which some are 0, and a tile's shape."""
    count, columns = draw(st.integers(0, 7)), draw(st.integers(2, 12))
    seed, k = draw(seeds), draw(st.integers(2, columns))
    head = head_of(
        count,
        columns,
        width=draw(st.integers(1, 4)),
        seed=seed,
        scale=draw(st.sampled_from([1.0, 0.3])),
        soft_cap=draw(st.sampled_from([None, 4.0])),
    )
    if draw(st.booleans()):
        head = replace(head, bias=None)
    targets = targets_of(
        normal(count, columns, seed=seed + 3),
        k=k,
        temperature=draw(st.sampled_from([1.0, 0.5, 2.0])),
        width=k + draw(st.integers(0, 2)),
    )
    cut = (draw(st.integers(1, 8)), draw(st.integers(1, 13)))
    return head, targets, normal(count, seed=seed + 4).clamp_min(0), cut


class TestDefinition:
    @pytest.mark.parametrize("tail", Tail)
    @given(st.data(), drawn())
    @settings(max_examples=40)
    def test_is_that_of_plain_autograd_however_it_is_cut(
        self,
        tail: Tail,
        data: st.DataObject,
        case: tuple[Head, Targets, torch.Tensor, tuple[int, int]],
    ) -> None:
        pair = data.draw(st.sampled_from([pair for pair in ALL if pair[1] is tail]))
        head, targets, weights, cut = case
        plain, ours = head.leaves(), head.leaves()
        expected = (by_definition(*pair, head.dense(*plain), targets) * weights).sum()
        expected.backward()

        with pytest.MonkeyPatch.context() as at_once:
            small_tiles(at_once, *cut)
            loss, count = loss_of(*pair)(head.tiled(*ours), targets, weights)
            loss.backward()

        assert torch.allclose(loss, expected, atol=1e-9, rtol=1e-9)
        assert torch.allclose(count, weights.sum())
        for leaf, other in zip(ours, plain, strict=True):
            assert leaf.grad is not None
            assert other.grad is not None
            assert torch.allclose(leaf.grad, other.grad, atol=1e-9, rtol=1e-9)

    @pytest.mark.usefixtures("tiny_tiles")
    @each_loss
    @pytest.mark.parametrize("soft_cap", [None, 3.0])
    def test_gradients_are_what_finite_differences_say(
        self, name: str, tail: Tail, soft_cap: float | None
    ) -> None:
        head = head_of(4, 7, width=2, scale=0.7, soft_cap=soft_cap)
        targets = targets_of(normal(4, 7, seed=9), k=3, temperature=2.0, width=4)
        weights = torch.tensor([0.25, 3.0, 0.0, 1.0])

        assert torch.autograd.gradcheck(
            lambda *leaves: 0.7 * loss_of(name, tail)(head.tiled(*leaves), targets, weights)[0],
            head.leaves(),
        )

    @pytest.mark.usefixtures("tiny_tiles")
    def test_of_the_squared_error_is_that_of_its_logits(self) -> None:
        head = head_of(4, 9)
        targets = targets_of(normal(4, 9, seed=9), k=5, width=6)
        plain, ours = head.leaves(), head.leaves()
        expected = losses.logprob_mse(head.dense(*plain), targets)[0]
        expected.backward()

        loss, _ = losses.logprob_mse(head.tiled(*ours), targets)
        loss.backward()

        assert torch.allclose(loss, expected)
        for leaf, other in zip(ours, plain, strict=True):
            assert leaf.grad is not None
            assert torch.allclose(leaf.grad, other.grad, atol=1e-12)  # type: ignore[arg-type]

    def test_has_exact_gradients_in_fp32_however_small_the_students_tail(self) -> None:
        from benchmarks.tail_gradients import MASSES, Positions, errors_of_ours

        for mass in MASSES:
            for each in errors_of_ours(Positions(mass, count=4)).values():
                assert max(each) <= 1e-5


@pytest.mark.usefixtures("tiny_tiles")
class TestPositions:
    def test_left_out_add_exactly_nothing_whatever_they_hold(self) -> None:
        keep = torch.tensor([True, False, True, True, False])
        head = head_of(5, 9)
        targets = targets_of(normal(5, 9, seed=9), k=4)
        few = head.leaves()
        few[0] = head.hidden[keep].clone().requires_grad_()
        expected, _ = losses.forward_kl(
            head.tiled(*few), targets_of(normal(5, 9, seed=9)[keep], k=4)
        )
        expected.backward()
        leaves = head.leaves()
        with torch.no_grad():
            leaves[0][~keep] = math.nan

        loss, count = losses.forward_kl(head.tiled(*leaves), targets, keep)
        loss.backward()

        assert torch.allclose(loss, expected)
        assert int(count) == 3
        grads = [leaf.grad for leaf in leaves]
        assert grads[0] is not None
        assert (grads[0][~keep] == 0).all()
        assert torch.allclose(grads[0][keep], few[0].grad)  # type: ignore[arg-type]
        for got, wanted in zip(grads[1:], few[1:], strict=True):
            assert torch.allclose(got, wanted.grad)  # type: ignore[arg-type]

    @each_loss
    def test_all_left_out_are_no_loss_and_no_gradient(self, name: str, tail: Tail) -> None:
        head = replace(head_of(3, 9), hidden=torch.full((3, 5), math.nan).double())
        leaves = head.leaves()

        loss, count = loss_of(name, tail)(
            head.tiled(*leaves), targets_of(normal(3, 9, seed=9), k=4), torch.zeros(3)
        )
        loss.backward()

        assert float(loss.detach()) == float(count) == 0
        assert all((leaf.grad == 0).all() for leaf in leaves)  # type: ignore[union-attr]

    def test_of_padded_rows_are_those_of_padded_logits(self) -> None:
        head = replace(head_of(8, 9), hidden=normal(2, 4, 5, seed=1))
        targets = replace(
            targets_of(normal(5, 9, seed=9), k=4),
            row_offsets=torch.tensor([0, 2, 5]),
            row_firsts=torch.tensor([1, 0]),
        )
        plain, ours = head.leaves(), head.leaves()
        expected, counted = losses.forward_kl(head.dense(*plain), targets)
        expected.backward()

        loss, count = losses.forward_kl(head.tiled(*ours), targets)
        loss.backward()

        assert torch.allclose(loss, expected)
        assert int(count) == int(counted)
        for leaf, other in zip(ours, plain, strict=True):
            assert leaf.grad is not None
            assert torch.allclose(leaf.grad, other.grad)  # type: ignore[arg-type]

    def test_of_the_last_part_of_the_hidden_states_need_not_be_copied_out(self) -> None:
        head = head_of(4, 9)
        targets = targets_of(normal(4, 9, seed=9), k=4)
        expected, _ = losses.forward_kl(head.tiled(*head.leaves()), targets)
        wide = torch.cat([head.hidden, head.hidden], 1)[:, 5:].requires_grad_()

        loss, _ = losses.forward_kl(losses.from_hidden(wide, head.weight, head.bias), targets)
        loss.backward()

        assert torch.allclose(loss, expected)

    def test_columns_of_bias_minus_infinity_are_not_there(self) -> None:
        head, targets = head_of(4, 9), targets_of(normal(4, 9, seed=9), k=4)
        padded = Head(
            hidden=head.hidden,
            weight=torch.cat([head.weight, torch.full((3, 5), 7.0).double()]),
            bias=torch.cat([head.bias, torch.full((3,), -torch.inf)]),  # type: ignore[list-item]
        )
        few, more = head.leaves(), padded.leaves()
        expected, _ = losses.forward_kl(head.tiled(*few), targets)
        expected.backward()

        loss, _ = losses.forward_kl(padded.tiled(*more), targets)
        loss.backward()

        assert torch.allclose(loss, expected)
        assert torch.allclose(more[0].grad, few[0].grad)  # type: ignore[arg-type]
        assert (more[1].grad[9:] == 0).all()  # type: ignore[index]

    def test_on_which_all_is_renormalised_do_not_look_at_other_columns(self) -> None:
        head = head_of(6, 9, soft_cap=5.0)
        targets = targets_of(normal(6, 6, seed=9), k=3)
        clean, spoilt = head.leaves(), head.leaves()
        with torch.no_grad():
            spoilt[1][6:] = math.nan
        for leaves in (clean, spoilt):
            losses.reverse_kl(head.tiled(*leaves), targets, tail=Tail.RENORMALISED)[0].backward()

        for leaf, other in zip(spoilt, clean, strict=True):
            assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]
            assert leaf.grad.any()  # type: ignore[union-attr]

    @pytest.mark.parametrize("at", [0, 4])
    def test_that_count_do_not_hide_a_nan(self, at: int) -> None:
        head, targets = head_of(5, 9), targets_of(normal(5, 9, seed=9), k=4)
        head.hidden[at, 2] = math.nan

        assert losses.forward_kl(head.tiled(*head.leaves()), targets)[0].isnan()


class TestTypes:
    @each_loss
    def test_of_16_bits_are_computed_in_32(self, name: str, tail: Tail) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            head = head_of(6, 40, scale=0.5)
            given = [each.to(dtype) for each in head.leaves()]
            targets = targets_of(normal(6, 40, seed=9), k=5)
            exact = [each.detach().double().requires_grad_() for each in given]
            ours = [each.detach().requires_grad_() for each in given]
            expected = loss_of(name, tail)(head.tiled(*exact), targets)[0]
            expected.backward()

            loss, _ = loss_of(name, tail)(head.tiled(*ours), targets)
            loss.backward()

            assert loss.dtype == torch.float32
            assert torch.allclose(loss.double(), expected, rtol=1e-5, atol=1e-5)
            for leaf, other in zip(ours, exact, strict=True):
                assert leaf.grad is not None
                assert leaf.grad.dtype == dtype
                step = torch.finfo(dtype).eps
                wanted: torch.Tensor = other.grad  # type: ignore[assignment]
                assert torch.allclose(leaf.grad.double(), wanted, atol=2e-5, rtol=step)

    @pytest.mark.usefixtures("tiny_tiles")
    def test_of_16_bits_are_rounded_once_however_many_tiles_there_are(self) -> None:
        """As sums in bf16 over tiles of 3 positions would not be."""
        head, targets = head_of(300, 8), targets_of(normal(300, 8, seed=9), k=3)
        given = [each.detach().bfloat16() for each in head.leaves()]
        exact = [each.double().requires_grad_() for each in given]
        ours = [each.clone().requires_grad_() for each in given]
        losses.forward_kl(head.tiled(*exact), targets)[0].backward()

        losses.forward_kl(head.tiled(*ours), targets)[0].backward()

        for leaf, other in zip(ours, exact, strict=True):
            wanted: torch.Tensor = other.grad  # type: ignore[assignment]
            off = (leaf.grad.double() - wanted).abs()  # type: ignore[union-attr]
            assert (off <= wanted.abs() * 2**-8 + 1e-4).all()

    def test_may_differ(self) -> None:
        head, targets = head_of(4, 9), targets_of(normal(4, 9, seed=9), k=3)
        hidden, weight, bias = head.leaves()
        mixed = [hidden.detach().bfloat16(), weight.detach().float(), bias.detach().bfloat16()]
        leaves = [each.requires_grad_() for each in mixed]

        loss, _ = losses.forward_kl(losses.from_hidden(*leaves), targets)
        loss.backward()

        assert loss.dtype == torch.float32
        assert [leaf.grad.dtype for leaf in leaves] == [leaf.dtype for leaf in leaves]  # type: ignore[union-attr]

    def test_are_not_autocasts_business(self) -> None:
        head, targets = head_of(4, 9), targets_of(normal(4, 9, seed=9), k=3)
        plain, cast = ([e.detach().float().requires_grad_() for e in head.leaves()] for _ in "ab")
        expected, _ = losses.forward_kl(head.tiled(*plain), targets)
        expected.backward()

        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, _ = losses.forward_kl(head.tiled(*cast), targets)
            loss.backward()

        assert torch.equal(loss, expected)
        for leaf, other in zip(cast, plain, strict=True):
            assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]


def widening(plain: Callable[..., torch.Tensor], widened: list[str]) -> Callable[..., torch.Tensor]:
    """What torch does on CUDA with ``out_dtype``: factors in 16 bits, the sums in 32."""

    def product(
        *given: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if out_dtype is None:
            return plain(*given, out=out)
        assert {each.dtype for each in given[-2:]} == {torch.bfloat16}
        assert {each.dtype for each in given[:-2]} <= {out_dtype}
        widened.append(plain.__name__)
        return plain(*(each.to(out_dtype) for each in given), out=out)

    return product


class TestProductsOfBf16:
    """Where torch adds them up in fp32, which it does on CUDA; here it is acted out."""

    @pytest.mark.usefixtures("tiny_tiles")
    @pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
    def test_come_to_the_same_but_for_one_rounding_of_the_logits_gradient(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head, targets = head_of(50, 9), targets_of(normal(50, 9, seed=9), k=3)
        given = [each.detach().bfloat16() for each in head.leaves()]
        exact = [each.double().requires_grad_() for each in given]
        ours = [each.clone().requires_grad_() for each in given]
        expected, _ = loss_of(name, Tail.BUCKET)(head.tiled(*exact), targets)
        expected.backward()
        monkeypatch.setattr(products, "_widens", lambda tensor: True)
        widened: list[str] = []
        for product in (torch.mm, torch.addmm):
            monkeypatch.setattr(torch, product.__name__, widening(product, widened))

        loss, _ = loss_of(name, Tail.BUCKET)(head.tiled(*ours), targets)
        loss.backward()

        assert (widened.count("mm"), widened.count("addmm")) == (2 * 17 * 3, 2 * 17 * 3)
        assert torch.allclose(loss.double(), expected, rtol=1e-5)
        for leaf, other in zip(ours, exact, strict=True):
            assert leaf.grad is not None
            assert other.grad is not None
            assert leaf.grad.dtype == torch.bfloat16
            off = (leaf.grad.double() - other.grad).norm() / other.grad.norm()
            assert float(off) <= 2**-8

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_on_a_gpu(self, dtype: torch.dtype) -> None:
        head, targets = head_of(50, 999, width=64), targets_of(normal(50, 999, seed=9), k=30)
        given = [each.detach().to(dtype) for each in head.leaves()]
        exact = [each.double().requires_grad_() for each in given]
        ours = [each.cuda().requires_grad_() for each in given]
        expected, _ = losses.forward_kl(head.tiled(*exact), targets)
        expected.backward()

        loss, _ = losses.forward_kl(head.tiled(*ours), targets.to("cuda"))
        loss.backward()

        assert torch.allclose(loss.double().cpu(), expected, rtol=1e-4)
        for leaf, other in zip(ours, exact, strict=True):
            assert leaf.grad is not None
            assert other.grad is not None
            off = (leaf.grad.double().cpu() - other.grad).norm() / other.grad.norm()
            assert float(off) <= 2**-7


class _Made(TorchDispatchMode):
    """The largest storages, in bytes, that operations make anew; those of ``known`` are not."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {each.untyped_storage().data_ptr() for each in known}
        self._kept: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return out

    def sizes(self) -> list[int]:
        made = [each for at, each in self._kept.items() if at not in self._known]
        sizes: list[int] = [each.untyped_storage().nbytes() for each in made]
        return sorted(sizes, reverse=True)


class TestMemory:
    POSITIONS, COLUMNS, WIDTH = 96, 20_000, 8

    def made(
        self, *, dtype: torch.dtype, frozen: bool, tail: Tail, soft_cap: float | None = None
    ) -> list[int]:
        hidden = torch.randn(self.POSITIONS, self.WIDTH, dtype=dtype).requires_grad_()
        weight = torch.randn(self.COLUMNS, self.WIDTH, dtype=dtype).requires_grad_(not frozen)
        targets = targets_of(normal(self.POSITIONS, 50, seed=1), k=5)
        loss = losses.reverse_kl if tail is Tail.NEMO_FLOOR else losses.forward_kl
        logits = losses.from_hidden(hidden, weight, soft_cap=soft_cap)
        with pytest.MonkeyPatch.context() as at_once, _Made(hidden, weight) as made:
            small_tiles(at_once, 32, 500)
            loss(logits, targets, tail=tail)[0].backward()
        sizes: list[int] = made.sizes()
        return sizes

    @pytest.mark.parametrize("tail", Tail)
    @pytest.mark.parametrize("soft_cap", [None, 30.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_of_everything_that_is_made_only_the_gradient_is_larger_than_a_tile(
        self, tail: Tail, soft_cap: float | None, dtype: torch.dtype
    ) -> None:
        gradient, *rest = self.made(dtype=dtype, frozen=False, tail=tail, soft_cap=soft_cap)

        assert gradient == self.COLUMNS * self.WIDTH * dtype.itemsize
        assert max(rest) <= 32 * 500 * 4

    def test_of_a_frozen_head_no_gradient_is_made(self) -> None:
        assert max(self.made(dtype=torch.bfloat16, frozen=True, tail=Tail.BUCKET)) == 32 * 500 * 4

    def test_between_forward_and_backward_holds_a_few_numbers_a_position(self) -> None:
        hidden = torch.randn(self.POSITIONS, self.WIDTH).requires_grad_()
        weight = torch.randn(self.COLUMNS, self.WIDTH).requires_grad_()
        targets = targets_of(normal(self.POSITIONS, 50, seed=1), k=5)
        held: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            held.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses.forward_kl(losses.from_hidden(hidden, weight), targets)

        others = [each for each in held if each.shape != hidden.shape and each is not weight]
        sizes = [
            each.untyped_storage().nbytes()
            for each in others
            if each.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
        ]
        assert sizes
        assert max(sizes) <= self.POSITIONS * 6 * 8


def test_a_head_is_shown_by_its_shapes() -> None:
    head = losses.from_hidden(torch.zeros(4, 5), torch.zeros(9, 5), soft_cap=30.0)

    shown = "<HeadLogits hidden [4, 5], weight [9, 5], no bias, scale 1.0, soft cap 30.0, "
    assert repr(head) == shown + "torch.float32, cpu>"


class TestRefusals:
    @pytest.mark.parametrize(
        ("hidden", "weight", "bias"),
        [
            ((4, 5), (9, 6), None),
            ((5,), (9, 5), None),
            ((2, 2, 2, 5), (9, 5), None),
            ((4, 5), (9,), None),
            ((4, 5), (9, 5), (8,)),
            ((4, 5), (9, 5), (9, 1)),
        ],
    )
    def test_of_shapes_that_do_not_meet_name_them_all(
        self, hidden: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None
    ) -> None:
        parts = [torch.zeros(shape) for shape in (hidden, weight, bias) if shape is not None]
        with pytest.raises(PayloadInvalidError, match=r"shapes do not meet: hidden \(.*weight \("):
            losses.from_hidden(*parts)

    @pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
    def test_name_what_is_missing_and_what_to_give(self, name: str) -> None:
        given: dict[str, object] = {
            "hidden": torch.zeros(4, 5),
            "weight": torch.zeros(9, 5),
            "bias": torch.zeros(9),
        }
        such_as = {
            "hidden": "hidden states",
            "weight": r"lm_head\.weight",
            "bias": r"lm_head\.bias",
        }
        with pytest.raises(PayloadInvalidError, match=rf"^{name} is of type str.*{such_as[name]}"):
            losses.from_hidden(**{**given, name: "x"})  # type: ignore[arg-type]

    def test_of_a_module_say_what_to_give(self) -> None:
        with pytest.raises(PayloadInvalidError, match=r"weight is of type Linear; .*lm_head\.wei"):
            losses.from_hidden(torch.zeros(4, 5), torch.nn.Linear(5, 9))  # type: ignore[arg-type]

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.complex64])
    def test_of_packed_weights_and_whole_numbers(self, dtype: torch.dtype) -> None:
        with pytest.raises(PayloadInvalidError, match=r"weight is .*: give dense floats"):
            losses.from_hidden(torch.zeros(4, 5), torch.zeros(9, 5, dtype=dtype))

    def test_of_two_devices(self) -> None:
        with pytest.raises(PayloadInvalidError, match="lie on cpu, meta; bring them together"):
            losses.from_hidden(torch.zeros(4, 5), torch.zeros(9, 5, device="meta"))

    @pytest.mark.parametrize("cap", [0, -30.0, math.inf, math.nan, "30"])
    def test_of_a_cap_that_is_none(self, cap: float) -> None:
        with pytest.raises(ConfigError, match=r"soft_cap is .*above 0, or None"):
            losses.from_hidden(torch.zeros(4, 5), torch.zeros(9, 5), soft_cap=cap)

    @pytest.mark.parametrize("scale", [math.inf, math.nan, "2"])
    def test_of_a_scale_that_is_no_number(self, scale: float) -> None:
        with pytest.raises(ConfigError, match=r"scale is .*finite"):
            losses.from_hidden(torch.zeros(4, 5), torch.zeros(9, 5), scale=scale)

    def test_of_an_id_that_the_head_has_no_row_for(self) -> None:
        targets = targets_of(normal(4, 10, seed=1), k=10)
        with pytest.raises(PayloadInvalidError, match="name id 9 and the student has 9 columns"):
            losses.forward_kl(losses.from_hidden(torch.zeros(4, 5), torch.zeros(9, 5)), targets)

    def test_of_other_positions_than_the_targets_have(self) -> None:
        targets = targets_of(normal(4, 9, seed=1), k=3)
        with pytest.raises(PayloadInvalidError, match=r"shape \(3, 9\) .* 4 positions"):
            losses.forward_kl(losses.from_hidden(torch.zeros(3, 5), torch.zeros(9, 5)), targets)
