"""The golden extreme rows over a vocabulary in shards, in fp32. No test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.cases.test_loss_cases import EXTREME, loss_of, targets

from teacher_logits_client.losses import VocabShard

if TYPE_CHECKING:
    import torch.distributed as dist


def extreme(
    group: dist.ProcessGroup, rank: int, name: str, cuts: tuple[int, ...]
) -> tuple[list[float], list[list[float]]]:
    """Each position's loss, and the gradient of this rank's columns."""
    begin, end = cuts[rank], cuts[rank + 1]
    shard = VocabShard(begin, end, group=group)
    golden = targets(EXTREME["idx"], EXTREME["logprob"], EXTREME["log_tail"])
    logits = torch.from_numpy(EXTREME["student_logits"]).float()[:, begin:end]
    each = [
        float(loss_of(name)(logits, golden, mask, shard=shard)[0])
        for mask in torch.eye(len(logits))
    ]
    leaf = logits.clone().requires_grad_()
    loss_of(name)(leaf, golden, shard=shard)[0].backward()
    assert leaf.grad is not None
    return each, leaf.grad.tolist()
