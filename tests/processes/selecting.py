"""Four ranks of gloo, each with a shard of the head, which merge what they select. No test.

python -m tests.processes.selecting FOLDER

forks the ranks, with torch imported once; they meet by a file in the folder, and each writes
what it found to `rank-R.json` there.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.processes.gloo_ranks import fork_ranks

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.selection.partial_selection import PartialSelection, select_partial
from teacher_logits.selection.rank_merging import merge_over_ranks

RANKS = 4
PATIENCE = timedelta(seconds=120)
#: Uneven shards: one narrower than K, and one of padding alone.
BOUNDS = (0, 5, 60, 101, 110)
VOCABULARY, K, POSITIONS = 97, 12, 6
TEMPERATURES = (1.0, 2.0)


def logits() -> torch.Tensor:
    """The whole head's logits, coarse enough to tie across shards; the same in every process."""
    generator = torch.Generator().manual_seed(11)
    rows = (torch.randn(POSITIONS, BOUNDS[-1], generator=generator) * 4).round() / 2
    rows[:, VOCABULARY:] = 50.0
    rows[2, 70] = torch.nan
    rows[4] = -torch.inf
    return rows.bfloat16()


def next_ids() -> torch.Tensor:
    """The token that comes next at each position."""
    return torch.tensor([0, 96, 3, 59, 7, -1])


def shard(rank: int, **given: object) -> PartialSelection:
    """What a rank selects of its ids."""
    start, stop = BOUNDS[rank : rank + 2]
    settings: dict[str, object] = {
        "k": K,
        "vocab_size": VOCABULARY,
        "temperatures": TEMPERATURES,
        "next_ids": next_ids(),
    }
    return select_partial(
        logits()[:, start:stop],
        first_id=start,
        **{**settings, **given},  # type: ignore[arg-type]
    )


def main(folder: Path) -> int:
    """Run the ranks; 0 where all of them came through."""
    return fork_ranks(RANKS, run, folder)


def run(rank: int, folder: Path) -> None:
    """Merge, and say what came of it; then be told of a rank that disagrees, and go on."""
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", meeting, rank=rank, world_size=RANKS, timeout=PATIENCE)
    pair = dist.new_group([0, 1])
    refusals = []
    shifted = next_ids().roll(1)
    for others in (
        {"k": 3},
        {"temperatures": (1.0, 3.0)},
        {"next_ids": None},
        {"next_ids": shifted},
    ):
        given = others if rank == 3 else {}
        try:
            merge_over_ranks(shard(rank, **given))
        except PayloadInvalidError as error:
            refusals.append(f"{error.facts['rank']} {error.facts['what']}")
    found = merge_over_ranks(shard(rank)).finish()
    said: dict[str, object] = {
        "refusals": refusals,
        "ids": found.topk_ids.tolist(),
        "status": found.status.tolist(),
        "numbers": [
            tensor.flatten().tolist()
            for tensor in (
                found.topk_logprobs,
                found.log_tail,
                found.logsumexp,
                found.actual_logprob,
            )
            if tensor is not None
        ],
    }
    if rank < 2:
        said["pair"] = merge_over_ranks(shard(rank), group=pair).spans
    (folder / f"rank-{rank}.json").write_text(json.dumps(said), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1])))
