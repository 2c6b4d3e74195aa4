"""What autograd makes of a loss beside plain training: once, and of whatever tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from tests.client.losses.losses_by_definition import normal, targets_of

from teacher_logits.errors import PayloadInvalidError, RequestInvalidError
from teacher_logits_client.losses import dense_forward_kl, forward_kl, from_hidden

P, H, V = 4, 3, 12
OfLogits = Callable[[torch.Tensor], torch.Tensor]


def coarse(leaf: torch.Tensor) -> torch.Tensor:
    return forward_kl(leaf, targets_of(normal(P, V, seed=1), k=3))[0]


def hidden(leaf: torch.Tensor) -> torch.Tensor:
    head = from_hidden(leaf[:, :H], normal(V, H, seed=2))
    return forward_kl(head, targets_of(normal(P, V, seed=1), k=3))[0]


def dense(leaf: torch.Tensor) -> torch.Tensor:
    return dense_forward_kl(leaf, normal(P, V, seed=1), tile=5)[0]


def nested() -> torch.Tensor:
    """Rows as verl may have them, which are strided by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype, says torch
        return torch.nested.nested_tensor([torch.zeros(2, V), torch.zeros(2, V)])


each_way = pytest.mark.parametrize("loss", [coarse, hidden, dense])


@each_way
def test_a_second_derivative_is_refused_and_not_taken_for_0(loss: OfLogits) -> None:
    """As once_differentiable has it, a penalty of the gradient would change nothing."""
    leaf = normal(P, V, seed=3).requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)

    with pytest.raises(RequestInvalidError, match="first derivatives only"):
        (value + gradient.square().sum()).backward()


@each_way
def test_a_graph_of_the_gradient_that_nobody_uses_is_fine(loss: OfLogits) -> None:
    leaf = normal(P, V, seed=3).requires_grad_()
    (plain,) = torch.autograd.grad(loss(leaf), leaf)

    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)

    assert torch.equal(gradient.detach(), plain)


@pytest.mark.parametrize("tile", [5, 8192])
def test_a_dense_teacher_may_have_been_made_under_inference_mode(tile: int) -> None:
    teacher, student = normal(P, V, seed=1), normal(P, V, seed=2)
    with torch.inference_mode():
        inferred = teacher * 1

    found = [student.clone().requires_grad_() for _ in range(2)]
    for each, of in zip(found, (teacher, inferred), strict=True):
        dense_forward_kl(each, of, tile=tile)[0].backward()

    assert found[0].grad is not None
    assert found[1].grad is not None
    assert torch.equal(found[0].grad, found[1].grad)


def test_so_may_a_frozen_head() -> None:
    weight = normal(V, H, seed=2)
    with torch.inference_mode():
        inferred = weight * 1

    found = [normal(P, H, seed=3).requires_grad_() for _ in range(2)]
    for each, head in zip(found, (weight, inferred), strict=True):
        forward_kl(from_hidden(each, head), targets_of(normal(P, V, seed=1), k=3))[0].backward()

    assert found[0].grad is not None
    assert found[1].grad is not None
    assert torch.equal(found[0].grad, found[1].grad)


def test_weights_are_constants_even_where_they_want_a_gradient() -> None:
    weights = torch.rand(P, dtype=torch.float64, requires_grad=True)
    leaf = normal(P, V, seed=3).requires_grad_()

    loss, count = forward_kl(leaf, targets_of(normal(P, V, seed=1), k=3), weights)

    assert not count.requires_grad
    (loss / count).backward()
    assert weights.grad is None


@pytest.mark.parametrize(
    "logits",
    [
        nested(),
        torch.zeros(P, V).to(torch.float8_e4m3fn),
        torch.zeros(P, V).to_sparse(),
    ],
)
def test_logits_are_one_array_of_floats(logits: torch.Tensor) -> None:
    with pytest.raises(PayloadInvalidError, match="give dense floats, of bf16, fp16, fp32 or fp64"):
        forward_kl(logits, targets_of(normal(P, V, seed=1), k=3))


def test_nested_heads_and_dense_logits_are_refused_by_name() -> None:
    with pytest.raises(PayloadInvalidError, match=r"hidden is torch.float32 \(nested\)"):
        from_hidden(nested(), torch.zeros(V, V))
    with pytest.raises(PayloadInvalidError, match="teacher logits have nested rows"):
        dense_forward_kl(torch.zeros(P, V), nested())
    with pytest.raises(PayloadInvalidError, match="the mask is a"):
        dense_forward_kl(torch.zeros(P, V), torch.zeros(P, V), nested())
    with pytest.raises(PayloadInvalidError, match="shapes do not meet"):
        from_hidden(torch.zeros(P, 0), torch.zeros(V, 0))
