"""The top k over a sharded vocabulary, and who holds which positions, against NeMo RL's answers.

`vocab_topk_cases.pt` has what upstream's gloo ranks found: rank r of n owns an n-th of the ids.
Upstream inherits `torch.topk`'s order of ties, so values are compared exactly and ids by what
they point at; ours are in the agreed order besides.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.cases.golden import tensors

from teacher_logits.selection import select_top_k
from teacher_logits.selection.partial_selection import merge_partials, select_partial
from teacher_logits.zigzag import zigzag_positions

GOLDEN = tensors("vocab_topk_cases.pt")
CASES: list[dict[str, Any]] = GOLDEN["cases"]
LAYOUTS: list[Sequence[Any]] = GOLDEN["cp_layout"]
if not CASES or not LAYOUTS:
    raise ValueError("vocab_topk_cases.pt holds no case")


def name(case: dict[str, Any]) -> str:
    return f"tp{case['tp_size']}-k{case['k']}-{list(case['logits'].shape)}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_shards_of_the_vocabulary_have_upstreams_entries(case: dict[str, Any]) -> None:
    logits, k, ranks = case["logits"], case["k"], case["tp_size"]
    vocabulary = logits.shape[-1]
    each = vocabulary // ranks

    merged = merge_partials(
        select_partial(
            logits[..., rank * each : (rank + 1) * each],
            k=k,
            first_id=rank * each,
            vocab_size=vocabulary,
        )
        for rank in range(ranks)
    )

    kept = case["topk_vals"].shape[-1]
    values, ids = (case[field].view(-1, kept) for field in ("topk_vals", "topk_indices"))
    flat = logits.view(-1, vocabulary).float()
    found = min(kept, vocabulary)
    assert torch.equal(merged.logits[:, :found], values[:, :found])
    assert torch.equal(flat.gather(1, merged.ids[:, :found]), flat.gather(1, ids[:, :found].long()))
    assert torch.equal(merged.finish().topk_ids, select_top_k(logits, k=k).topk_ids)


@pytest.mark.parametrize(
    ("rank", "size", "owned"), LAYOUTS, ids=[f"rank{rank}of{size}" for rank, size, _ in LAYOUTS]
)
def test_context_parallel_ranks_hold_upstreams_positions(
    rank: int, size: int, owned: object
) -> None:
    runs = zigzag_positions(24, rank=rank, size=size)

    assert [[each for run in runs for each in run]] == owned
