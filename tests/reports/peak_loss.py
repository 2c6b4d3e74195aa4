"""A loss over 4096 tokens of 151,936 ids, and how far memory rose: a process of its own.

    python peak_loss.py        a JSON object: the loss, the dense one, and extra MiB

Run by path; it is no test. Extra is what lies beside the logits and their gradient.
"""

import json
import re
import sys
from pathlib import Path

import torch

from teacher_logits_client import Targets, losses

TOKENS, V, K = 4096, 151_936, 64


def peak() -> int:
    """Return the highest resident size of this process so far, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def main() -> None:
    """Measure, and write it."""
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, V, generator=chance, dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(0, V // K, (TOKENS, K), generator=chance) + torch.arange(K) * (V // K)
    logprobs = torch.log_softmax(torch.randn(TOKENS, K + 1, generator=chance), 1)
    targets = Targets(
        topk_ids=ids.int(),
        topk_logprobs=logprobs[:, :K],
        log_tail=logprobs[:, K],
        actual_logprob=None,
        valid=torch.ones(TOKENS, dtype=torch.bool),
        temperature=1.0,
        row_offsets=torch.tensor([0, TOKENS]),
    )
    losses.forward_kl(logits[:8].detach(), _first(targets, 8))  # what is loaded late is loaded now
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    loss, _ = losses.forward_kl(logits, targets)
    loss.backward()
    extra = peak() - before - logits.numel() * logits.element_size()
    dense = 0.0
    for start in range(0, TOKENS, 64):  # a piece at a time, which would not fit otherwise
        part = slice(start, start + 64)
        student = logits.detach()[part].double().log_softmax(1)
        chosen = student.gather(1, ids[part])
        outside = torch.log1p(-chosen.exp().sum(1, keepdim=True))
        teacher = logprobs[part].double()
        dense += float((teacher.exp() * (teacher - torch.cat([chosen, outside], 1))).sum())
    figures = {"loss": float(loss.detach()), "dense": dense, "extra_mib": extra / (1 << 20)}
    sys.stdout.write(json.dumps(figures))


def _first(targets: Targets, count: int) -> Targets:
    return Targets(
        topk_ids=targets.topk_ids[:count],
        topk_logprobs=targets.topk_logprobs[:count],
        log_tail=targets.log_tail[:count],
        actual_logprob=None,
        valid=targets.valid[:count],
        temperature=1.0,
        row_offsets=torch.tensor([0, count]),
    )


if __name__ == "__main__":
    main()
