"""Two ranks of gloo, each a process, that train together and say how far they went. No test.

python -m tests.client.trainers.trainer_ranks ADDRESS FOLDER [trl]

forks the ranks, with torch and transformers imported once; they meet by a file in the folder, and
each writes `rank-R.pt` there.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tests.client.trainers import trainer_rig as rig
from torch._C._distributed_c10d import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Trainer

RANKS = 2
#: Rows of a micro batch, micro batches of a rank: of 8 rows, and of TRL's 4 prompts.
CUTS = [(4, 1), (2, 2)]
TRL_CUTS = [(2, 1), (1, 2)]


def main(address: str, folder: Path, *, with_trl: bool) -> int:
    """Run the ranks; return the worst of their exit codes."""
    importlib.import_module(  # once for both
        "tests.client.trainers.trl_rig"
        if with_trl
        else "teacher_logits_client.trainers.transformers"
    )
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is no garbage, of which a trainer collects at each beginning
    ranks = [
        multiprocessing.get_context("fork").Process(
            target=train, args=(address, folder, rank, with_trl)
        )
        for rank in range(RANKS)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return max(abs(each.exitcode or 0) for each in ranks)


def train(address: str, folder: Path, rank: int, with_trl: bool) -> None:
    """Take one step a cut, with an evaluation before."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = FileStore(str(folder / "meeting"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    results = {}
    make: Callable[..., Trainer] = rig.a_trainer
    if with_trl:
        from tests.client.trainers import trl_rig

        make = trl_rig.a_trainer
    for micro_batch, accumulation in TRL_CUTS if with_trl else CUTS:
        trainer = make(
            address,
            folder / f"out-{rank}",
            per_device_train_batch_size=micro_batch,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=accumulation,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
            # The second cut takes its loss from hidden states, which DDP sees nothing of.
            loss_from_hidden=accumulation > 1,
        )
        if with_trl:  # of which one comes twice, as in the others' evaluation
            trainer.eval_dataset = trl_rig.prompts(3)
        evaluated = trainer.evaluate()["eval_loss"]
        step = rig.step_of(trainer)
        [loss] = rig.logged(trainer, "loss")
        results[micro_batch, accumulation] = {"step": step, "loss": loss, "evaluated": evaluated}
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), with_trl="trl" in sys.argv[3:]))
