"""How far the gradient is off where the student's tail is tiny: ours, and tails with a clamp.

For each q0, the student's mass outside the K ids: some positions of 4096 columns in fp32 whose
teacher has 0.05 there. The error is the relative L2 one of the whole gradient, against plain
autograd in float64 over the complement, of the same fp32 inputs. No main: `benchmarks.losses`
runs it.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import torch
from benchmarks.anchors.clamped_tails import CLAMPED_TAILS
from benchmarks.report import report

from teacher_logits_client import losses
from teacher_logits_client.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Callable

    Tail = Callable[[torch.Tensor], torch.Tensor]

MASSES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
TEACHER_MASS, COLUMNS, WIDTH, K = 0.05, 4096, 64, 16


class Positions:
    """Positions [P] whose student has ``mass`` outside, and whose teacher 0.05.

    ``hidden`` [P,WIDTH] and ``weight`` [COLUMNS,WIDTH] give the logits; the last column of both
    moves each position's logits at its ids, which are the same for all.
    """

    def __init__(self, mass: float, *, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        draw = (torch.randn(size, WIDTH, generator=generator) for size in (count, COLUMNS, count))
        hidden, self.weight, teacher = draw
        self.ids = torch.randperm(COLUMNS, generator=generator)[:K]
        self.weight[:, -1] = 0.0
        self.weight[self.ids, -1] = 1.0
        self.hidden = self._with_mass(hidden / math.sqrt(WIDTH), mass)
        self.log_p = self._coarse(self._with_mass(teacher / math.sqrt(WIDTH), TEACHER_MASS))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [P,COLUMNS] of hidden states, in their type."""
        return hidden @ self.weight.t().to(hidden.dtype)

    def _with_mass(self, hidden: torch.Tensor, mass: float) -> torch.Tensor:
        hidden[:, -1] = 0.0
        coarse = self._coarse(hidden)
        inside = coarse[:, :-1].logsumexp(1)
        hidden[:, -1] = coarse[:, -1] - inside + math.log((1 - mass) / mass)
        return hidden

    def _coarse(self, hidden: torch.Tensor) -> torch.Tensor:
        return coarse_logs(self.logits(hidden.double()), self.ids)

    def targets(self) -> Targets:
        """What the teacher says, in fp32."""
        count = len(self.log_p)
        return Targets(
            topk_ids=self.ids.int().repeat(count, 1),
            topk_logprobs=self.log_p[:, :-1].float(),
            log_tail=self.log_p[:, -1].float(),
            actual_logprob=None,
            valid=torch.ones(count, dtype=torch.bool),
            temperature=1.0,
            row_offsets=torch.tensor([0, count]),
        )


def coarse_logs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of the ids and of all else [P,K+1], over the complement."""
    logprobs = logits.log_softmax(1)
    outside = torch.ones(logits.shape[1], dtype=torch.bool).index_fill(0, ids, False)
    tail = logprobs[:, outside].logsumexp(1, keepdim=True)
    return torch.cat([logprobs[:, ids], tail], 1)


def tail_gradient_errors(count: int) -> None:
    """Write every implementation's error at every q0, over ``count`` positions."""
    clamped = _clamped_tails()
    for mass in MASSES:
        at = Positions(mass, count=count)
        for name, each in (errors_of_ours(at) | _errors_of(clamped, at)).items():
            report("tail_gradient_error", "relative L2", each, implementation=name, q0=mass)


def _clamped_tails() -> dict[str, Tail]:
    """Return those that are installed, and say on standard error which are not."""
    there = {}
    for name, tail in CLAMPED_TAILS.items():
        try:
            tail(torch.full((1, 2), -1.0))
        except ImportError as error:
            sys.stderr.write(f"{name}: not measured, {error}; pip install --group peers\n")
        else:
            there[name] = tail
    return there


def errors_of_ours(at: Positions) -> dict[str, list[float]]:
    """Return the errors, one for each position (of the weight, one)."""
    hidden, logits = at.hidden, at.logits(at.hidden)
    of_logits = _gradients(lambda z: _kl(at, coarse_logs(z, at.ids)), logits.double())[0]
    of_head = _gradients(
        lambda h, w: _kl(at, coarse_logs(h @ w.t(), at.ids)), hidden.double(), at.weight.double()
    )
    targets = at.targets()
    ours = _gradients(lambda z: losses.forward_kl(z, targets)[0], logits)[0]
    from_hidden = _gradients(
        lambda h, w: losses.forward_kl(losses.from_hidden(h, w), targets)[0], hidden, at.weight
    )
    return {
        "ours": _each(ours, of_logits),
        "ours_from_hidden": _each(from_hidden[0], of_head[0]),
        "ours_from_hidden_weight": _each(*(w.reshape(1, -1) for w in (from_hidden[1], of_head[1]))),
    }


def _errors_of(tails: dict[str, Tail], at: Positions) -> dict[str, list[float]]:
    logits = at.logits(at.hidden)
    exact = _gradients(lambda z: _kl(at, coarse_logs(z, at.ids)), logits.double())[0]
    errors = {}
    for name, tail in tails.items():
        got = _gradients(lambda z, tail=tail: _kl(at, _clamped(z, at.ids, tail)), logits)[0]
        errors[name] = _each(got, exact)
    return errors


def _clamped(logits: torch.Tensor, ids: torch.Tensor, tail: Tail) -> torch.Tensor:
    chosen = logits.log_softmax(1)[:, ids]
    return torch.cat([chosen, tail(chosen)], 1)


def _kl(at: Positions, log_q: torch.Tensor) -> torch.Tensor:
    log_p = at.log_p.to(log_q.dtype)
    return (log_p.exp() * (log_p - log_q)).sum()


def _gradients(
    loss: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    return torch.autograd.grad(loss(*leaves), leaves)


def _each(got: torch.Tensor, exact: torch.Tensor) -> list[float]:
    errors = (got.double() - exact).norm(dim=1) / exact.norm(dim=1)
    return [float(each) for each in errors]
