"""What a rank does with its shard of a vocabulary, and what it says of it. No test.

Every rank makes the whole teacher and student of a case anew, from a seed, and takes its own
columns; behind them may lie padding, which is NaN.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tests.client.losses.losses_by_definition import Loss, loss_of, normal, targets_of
from torch.utils._python_dispatch import TorchDispatchMode

from teacher_logits.errors import TeacherLogitsError
from teacher_logits_client import losses
from teacher_logits_client.losses import Tail, VocabShard

if TYPE_CHECKING:
    from teacher_logits_client.targets import Targets

DENSE: dict[str, Loss] = {
    "dense_soft_cross_entropy": losses.dense_soft_cross_entropy,
    "dense_forward_kl": losses.dense_forward_kl,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss over `cuts[-1]` columns; rank r has those from `cuts[r]` to `cuts[r + 1]`."""

    name: str
    tail: Tail = Tail.BUCKET
    cuts: tuple[int, ...] = (0, 5, 12)
    order: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    positions: int = 4
    k: int = 3
    spare: int = 0
    temperature: float = 1.0
    scale: float = 2.0
    seed: int = 0
    dtype: torch.dtype = torch.float64
    masked: bool = True
    bins: int | None = None
    tile: int = 8192
    ruled_out: bool = False
    first_weight: float | None = None
    teacher_lower_by: float = 0.0
    bins_lower_by: int = 0

    @property
    def ranks(self) -> int:
        return len(self.cuts) - 1

    def bounds(self, rank: int) -> tuple[int, int]:
        place = self.order[rank] if self.order else rank
        return self.cuts[place], self.cuts[place + 1]

    def teacher(self) -> torch.Tensor:
        return normal(self.positions, self.cuts[-1], seed=self.seed, scale=self.scale)

    def student(self) -> torch.Tensor:
        found = normal(self.positions, self.cuts[-1], seed=self.seed + 1, scale=self.scale)
        if self.ruled_out:
            drawn = torch.rand(found.shape, generator=torch.Generator().manual_seed(self.seed))
            found = found.masked_fill(drawn < 0.3, -torch.inf)
        return found.to(self.dtype)

    def targets(self) -> Targets:
        found = targets_of(
            self.teacher(), k=self.k, temperature=self.temperature, width=self.k + self.spare
        )
        return replace(found, topk_logprobs=found.topk_logprobs - self.teacher_lower_by)

    def mask(self) -> torch.Tensor | None:
        if not self.masked:
            return None
        found = normal(self.positions, seed=self.seed + 2).clamp_min(0)
        if self.first_weight is not None:
            found[0] = self.first_weight
        return found

    def bin_ids(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        bins = self.bins or 1
        drawn = torch.randint(0, bins, (self.positions,), generator=generator)
        return (drawn - self.bins_lower_by) % bins

    def loss(
        self, logits: torch.Tensor, teacher: torch.Tensor, shard: VocabShard | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum and count; `teacher` are the columns of the teacher's that the logits have."""
        if self.name in DENSE:
            bins = {} if self.bins is None else {"bins": self.bins, "bin_ids": self.bin_ids()}
            loss: Loss = partial(
                DENSE[self.name], tile=self.tile, temperature=self.temperature, **bins
            )
            return loss(logits, teacher, self.mask(), shard=shard)
        if self.name == "logprob_mse":
            return losses.logprob_mse(logits, self.targets(), self.mask(), shard=shard)
        return loss_of(self.name, self.tail)(logits, self.targets(), self.mask(), shard=shard)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A rank's sums and counts, the gradient of its columns, and the collectives of each way."""

    sums: list[float]
    counts: list[float]
    gradient: list[list[float]]
    padding_is_zero: bool
    forward: list[str]
    backward: list[str]


class _Collectives(TorchDispatchMode):
    """Keeps the names of collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def weighted(sums: torch.Tensor) -> torch.Tensor:
    """One number of sums of bins, each weighed differently."""
    flat = sums.reshape(-1)
    return (flat * torch.arange(1, len(flat) + 1)).sum()


def alone(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums, counts and gradient of one process that has every column."""
    leaf = case.student().requires_grad_()
    sums, counts = case.loss(leaf, case.teacher(), None)
    weighted(sums).backward()
    assert leaf.grad is not None
    return sums.detach(), counts, leaf.grad


def sharded(group: dist.ProcessGroup, rank: int, case: Case) -> Found:
    begin, end = case.bounds(rank)
    shard = VocabShard(begin, end, group=group)
    spare = case.padding[rank] if case.padding else 0
    pad = partial(torch.nn.functional.pad, pad=(0, spare), value=torch.nan)
    leaf = pad(case.student()[:, begin:end]).requires_grad_()
    teacher = pad(case.teacher()[:, begin:end])
    with _Collectives() as forward:
        sums, counts = case.loss(leaf, teacher, shard)
    with _Collectives() as backward:
        weighted(sums).backward()
    assert leaf.grad is not None
    return Found(
        sums=sums.detach().reshape(-1).tolist(),
        counts=counts.reshape(-1).tolist(),
        gradient=leaf.grad[:, : end - begin].tolist(),
        padding_is_zero=not leaf.grad[:, end - begin :].any(),
        forward=forward.names,
        backward=backward.names,
    )


def head_of(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [P,5], weight [V,5] and bias [V] of a student."""
    hidden = normal(case.positions, 5, seed=case.seed + 3, scale=1.0)
    weight = normal(case.cuts[-1], 5, seed=case.seed + 4, scale=case.scale)
    return hidden, weight, normal(case.cuts[-1], seed=case.seed + 5)


def head_alone(case: Case) -> tuple[float, list[torch.Tensor]]:
    """The loss of one process, of plain logits, and the gradients of what they came from."""
    hidden, weight, bias = leaves = [each.requires_grad_() for each in head_of(case)]
    logits = hidden @ weight.T + bias
    loss, _ = loss_of(case.name, case.tail)(logits, case.targets(), case.mask())
    loss.backward()
    return float(loss.detach()), [each.grad for each in leaves if each.grad is not None]


def sharded_head(
    group: dist.ProcessGroup, rank: int, case: Case
) -> tuple[float, list[list[float]]]:
    """The loss of a head whose rows are sharded, padded behind; its gradients, flat.

    That of the hidden states is complete once the ranks have added theirs up, as here.
    """
    begin, end = case.bounds(rank)
    shard = VocabShard(begin, end, group=group)
    spare = case.padding[rank] if case.padding else 0
    hidden, weight, bias = head_of(case)
    own = [
        hidden,
        torch.nn.functional.pad(weight[begin:end], (0, 0, 0, spare), value=torch.nan),
        torch.nn.functional.pad(bias[begin:end], (0, spare), value=torch.nan),
    ]
    leaves = [each.requires_grad_() for each in own]
    logits = losses.from_hidden(*leaves)
    loss, _ = loss_of(case.name, case.tail)(logits, case.targets(), case.mask(), shard=shard)
    loss.backward()
    gradients = [each.grad for each in leaves if each.grad is not None]
    dist.all_reduce(gradients[0], group=group)
    found = [each[: end - begin] if place else each for place, each in enumerate(gradients)]
    assert not any(each[end - begin :].any() for each in gradients[1:])
    return float(loss.detach()), [each.flatten().tolist() for each in found]


def refused(error: TeacherLogitsError) -> tuple[str, str, dict[str, object]]:
    return type(error).__name__, str(error), dict(error.facts)


def told(
    group: dist.ProcessGroup, rank: int, cases: tuple[Case, ...], columns: tuple[int, ...]
) -> tuple[str, str, dict[str, object]] | None:
    """What a rank is refused that has a case of its own, of so many columns; None if nothing."""
    case = cases[rank]
    begin, end = case.bounds(rank)
    shard = VocabShard(begin, end, group=group)
    logits = case.student()[:, begin : begin + columns[rank]]
    try:
        case.loss(logits, case.teacher()[:, begin : begin + columns[rank]], shard)
    except TeacherLogitsError as error:
        return refused(error)
    return None


def told_of_whole_logits(
    group: dist.ProcessGroup, rank: int, case: Case, with_head: bool
) -> tuple[str, str, dict[str, object]] | None:
    """What a rank is refused that has a shard and does not cut its logits, or its head."""
    shard = VocabShard(*case.bounds(rank), group=group)
    logits = losses.from_hidden(*head_of(case)) if with_head else case.student()
    try:
        loss_of(case.name, case.tail)(logits, case.targets(), case.mask(), shard=shard)
    except TeacherLogitsError as error:
        return refused(error)
    return None


def told_of_scales(
    group: dist.ProcessGroup, rank: int, case: Case, scales: tuple[float, ...]
) -> tuple[str, str, dict[str, object]] | None:
    """What a rank is refused whose head has a scale of its own; None if nothing."""
    begin, end = case.bounds(rank)
    shard = VocabShard(begin, end, group=group)
    hidden, weight, bias = head_of(case)
    head = losses.from_hidden(hidden, weight[begin:end], bias[begin:end], scale=scales[rank])
    try:
        loss_of(case.name, case.tail)(head, case.targets(), case.mask(), shard=shard)
    except TeacherLogitsError as error:
        return refused(error)
    return None


def dense_teacher_told(
    group: dist.ProcessGroup, rank: int, case: Case, wrong: float
) -> tuple[str, str, dict[str, object]] | None:
    """What a rank is refused where one column of the teacher is wrong, which rank 1 has."""
    begin, end = case.bounds(rank)
    shard = VocabShard(begin, end, group=group)
    teacher = case.teacher()
    teacher[2, -1] = wrong
    try:
        losses.dense_forward_kl(case.student()[:, begin:end], teacher[:, begin:end], shard=shard)
    except TeacherLogitsError as error:
        return refused(error)
    return None


def made(
    group: dist.ProcessGroup, rank: int, bounds: tuple[tuple[int, int], ...]
) -> tuple[str, str, dict[str, object]] | int:
    """The size of the vocabulary that these shards make, or what was refused."""
    try:
        return VocabShard(*bounds[rank], group=group).vocabulary_size
    except TeacherLogitsError as error:
        return refused(error)


def sum_of(group: dist.ProcessGroup, rank: int, case: Case) -> float:
    """The sum alone, of many positions."""
    begin, end = case.bounds(rank)
    shard = VocabShard(begin, end, group=group)
    loss, _ = case.loss(case.student()[:, begin:end], case.teacher()[:, begin:end], shard)
    return float(loss)


class _FailsAtPowers(TorchDispatchMode):
    """Has no memory for powers, which come once tiles of logits do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "exp2" in str(func.overloadpacket):
            raise MemoryError("of rank 1")
        return func(*args, **(kwargs or {}))


def told_of_failure(group: dist.ProcessGroup, rank: int, case: Case, with_head: bool) -> str:
    """The beginning of what a rank hears where rank 1 fails in the middle of its columns."""
    begin, end = case.bounds(rank)
    shard = VocabShard(begin, end, group=group)
    hidden, weight, bias = (each.detach() for each in head_of(case))
    logits: object = case.student()[:, begin:end]
    if with_head:
        logits = losses.from_hidden(hidden, weight[begin:end], bias[begin:end])
    teacher = case.teacher()[:, begin:end]
    try:
        with _FailsAtPowers() if rank == 1 else nullcontext():  # type: ignore[no-untyped-call]
            case.loss(logits, teacher, shard)  # type: ignore[arg-type]
    except (TeacherLogitsError, MemoryError) as error:
        return f"{type(error).__name__}: {error}".partition(" of this loss")[0]
    return "nothing"
