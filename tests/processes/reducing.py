"""Four ranks of gloo, each a process, which do steps together and say what came of it. No test.

python -m tests.processes.reducing FOLDER

forks the ranks, with torch imported once; they meet by a file in the folder, and each writes
what it found to `rank-R.json` there. Groups: all four; 0 and 1; and, for a pipeline, all four
with owners and others.
"""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.processes.gloo_ranks import fork_ranks
from torch.nn.parallel import DistributedDataParallel

from teacher_logits.errors import ConfigError, RequestInvalidError
from teacher_logits_client.normalisation import (
    GroupReduction,
    StepLoss,
    StepNormaliser,
    StepReport,
    gradient_norms,
)

RANKS = 4
PATIENCE = timedelta(seconds=120)
WIDTH = 3
#: How many tokens each micro batch of each rank has: uneven, and one rank idle.
UNEVEN = {4: ((5, 1, 3), (2,), (), (4, 4)), 2: ((7,), (1, 2, 3))}
Found = dict[str, object]


def tokens(rank: int, number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The features [T,3] and the mask [T] of a micro batch, the same in every process."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    features = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return features, (torch.rand(count, generator=generator) < 0.6).double()


def a_model() -> torch.nn.Linear:
    """A model of one output, the same in every process."""
    model = torch.nn.Linear(WIDTH, 1, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.constant_(model.bias, -0.25)
    return model


def sum_and_count(
    model: torch.nn.Module, features: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss that is not linear, as those of the client return it."""
    each = torch.nn.functional.softplus(model(features).squeeze(1))
    return (each * mask).sum(), mask.sum()


def main(folder: Path) -> int:
    """Run the ranks; 0 where all of them came through."""
    importlib.import_module("torch._dynamo")  # DistributedDataParallel would, in each of them
    return fork_ranks(RANKS, run, folder)


def run(rank: int, folder: Path) -> None:
    """All stories of one rank, in the order that every rank has them in."""
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=RANKS, timeout=PATIENCE)
    two = dist.new_group([0, 1], timeout=PATIENCE)
    found: Found = {"four": added_up(rank, 4, None)}
    if rank < 2:
        found["two"] = added_up(rank, 2, two)
    found["averaged"] = averaged(rank)
    found["nothing"] = nothing(rank)
    found["disagreeing"] = disagreeing(rank)
    found["other bins"] = other_bins(rank, 90)
    found["many more bins"] = other_bins(rank, 1000)
    found["as many bins"] = many_bins(rank)
    found["another model"] = another_model(rank)
    found["no groups"] = [refusal(two), refusal([0, 1])]
    found["retried"] = retried(rank)
    found["norms"] = norms(rank)
    found["modules"] = sorted({"grpc", "teacher_logits_server"} & set(sys.modules))
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"rank-{rank}.json").write_text(json.dumps(found), "utf-8")


def added_up(rank: int, ranks: int, group: dist.ProcessGroup | None) -> Found:
    """Uneven micro batches, and gradients that the loop itself adds up."""
    model = a_model()
    normaliser = StepNormaliser(
        StepLoss(parameters=model.parameters()), reduction=GroupReduction(group)
    )
    with normaliser.begin(step=1) as step:
        for number, count in enumerate(UNEVEN[ranks][rank]):
            batch = tokens(rank, number, count)
            step.microbatch(number, *sum_and_count(model, *batch)).backward()
        report = step.finish()
    return {**said(report), "gradient": together(model, group)}


def averaged(rank: int) -> Found:
    """The same by DistributedDataParallel; its idle rank runs one micro batch, all masked."""
    model = DistributedDataParallel(a_model())
    normaliser = StepNormaliser(
        StepLoss(parameters=model.parameters()),
        reduction=GroupReduction(),
        gradients_averaged_over=RANKS,
    )
    batches = [tokens(rank, number, count) for number, count in enumerate(UNEVEN[4][rank])]
    batches = batches or [(torch.ones(1, WIDTH, dtype=torch.float64), torch.zeros(1))]
    with normaliser.begin(step=2) as step:
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with nullcontext() if is_last else model.no_sync():
                step.microbatch(number, *sum_and_count(model, *batch)).backward()
        report = step.finish()
    return {**said(report), "gradient": flat(model)}


def nothing(rank: int) -> Found:
    """No token counts anywhere; one rank has NaN in what is masked, one has no micro batch."""
    model = a_model()
    normaliser = StepNormaliser(StepLoss(parameters=model.parameters()), reduction=GroupReduction())
    with normaliser.begin(step=3) as step:
        if rank != 2:
            features = torch.full((2, WIDTH), float("nan") if rank == 1 else 1.0).double()
            batch = features, torch.zeros(2, dtype=torch.float64)
            step.microbatch(0, *sum_and_count(model, *batch)).backward()
        report = step.finish()
    return {**said(report), "gradient": flat(model), "should_step": report.should_step}


def disagreeing(rank: int) -> str:
    """One rank is a step ahead: all hear of it, and none waits."""
    normaliser = StepNormaliser(reduction=GroupReduction())
    try:
        normaliser.begin(step=5 if rank == 3 else 4).finish()
    except RequestInvalidError as refused:
        return refused.reason
    return "agreed"


def refusal(group: object) -> str:
    """What this rank hears where it reduces over a group that is none of its own."""
    if dist.get_rank() < 2 and isinstance(group, dist.ProcessGroup):
        return "a member"
    normaliser = StepNormaliser(reduction=GroupReduction(group))  # type: ignore[arg-type]
    try:
        normaliser.begin(step=4).finish()
    except ConfigError as refused:
        return str(refused)
    return "reduced"


def many_bins(rank: int) -> list[float]:
    """More bins than one reduction has room for: the first and the last of the reduced counts."""
    bins = 300
    normaliser = StepNormaliser(StepLoss(bin_weights=(1.0,) * bins), reduction=GroupReduction())
    step = normaliser.begin(step=4)
    step.microbatch(0, torch.zeros(bins), torch.arange(bins) * rank)
    (loss,) = step.finish().losses.values()
    return [loss.counts[0], loss.counts[-1]]


def another_model(rank: int) -> str:
    """One rank names the parameters of a model that it does not train: all hear of it."""
    model = a_model()
    named = a_model() if rank == 2 else model
    normaliser = StepNormaliser(StepLoss(parameters=named.parameters()), reduction=GroupReduction())
    step = normaliser.begin(step=4)
    step.microbatch(0, *sum_and_count(model, *tokens(rank, 0, 3))).backward()
    try:
        step.finish()
    except ConfigError as refused:
        return str(refused.facts["ranks"])
    return "finished"


def other_bins(rank: int, bins: int) -> str:
    """One rank has many more bins than the others: all hear of it, and none waits."""
    weights = (1.0,) * (bins if rank == 1 else 1)
    normaliser = StepNormaliser(StepLoss(bin_weights=weights), reduction=GroupReduction())
    try:
        normaliser.begin(step=4).finish()
    except RequestInvalidError as refused:
        return refused.reason
    return "agreed"


def retried(rank: int) -> Found:
    """An attempt that every rank aborts half-way, and the same step once more."""
    model = a_model()
    normaliser = StepNormaliser(StepLoss(parameters=model.parameters()), reduction=GroupReduction())
    step = normaliser.begin(step=6)
    step.microbatch(0, *sum_and_count(model, *tokens(rank, 9, 4))).backward()
    normaliser.abort()
    with normaliser.begin(step=6) as step:
        for number, count in enumerate(UNEVEN[4][rank]):
            batch = tokens(rank, number, count)
            step.microbatch(number, *sum_and_count(model, *batch)).backward()
        report = step.finish()
    return {**said(report), "attempt": report.attempt, "gradient": together(model, None)}


def norms(rank: int) -> dict[str, float]:
    """A pipeline: ranks 0 to 2 own some of the policy, rank 3 alone the draft."""
    owned = torch.full((rank + 1,), float(rank + 1), dtype=torch.float64)
    owned.grad = owned.clone()
    groups = {"policy": [owned] if rank < 3 else [], "draft": [owned] if rank == 3 else []}
    return gradient_norms(groups, GroupReduction())


def said(report: StepReport) -> Found:
    """The report's numbers."""
    (loss,) = report.losses.values()
    return {"mean": loss.mean, "count": loss.denominator, "ranks": report.ranks}


def together(model: torch.nn.Module, group: dist.ProcessGroup | None) -> list[float]:
    """The gradients, added up over a group by the loop itself."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
    return flat(model)


def flat(model: torch.nn.Module) -> list[float]:
    """All gradients, one after the other; 0 where there is none."""
    each = [
        torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
        for p in model.parameters()
    ]
    found: list[float] = torch.cat(each).tolist()
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
