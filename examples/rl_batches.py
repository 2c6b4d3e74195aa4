"""A served teacher in the tensor keys of NeMo RL and of verl; neither needs to be installed.

    python rl_batches.py unix:/tmp/own/teacher.sock      (own_engine.py starts one there)

A trainer's own loss reads these keys, or `to_targets` takes them to ours.
"""

from __future__ import annotations

import sys

import torch

import teacher_logits_client as tl
from teacher_logits_client.trainers import nemo_rl, verl

VOCABULARY, K = 256, 8


def nemo_rl_loss(session: tl.Session, student: torch.nn.Module) -> float:
    """Fill a batch as NeMo RL's driver does, and learn two context-parallel parts of it."""
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2], [4, 4, 4, 4, 4, 0, 0, 0]])
    batch: dict[str, torch.Tensor] = {
        "input_ids": ids,
        "input_lengths": torch.tensor([8, 5]),
        "token_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0, 0]]),
        "sample_mask": torch.ones(2),
    }
    told = nemo_rl.get_topk_logits(session, batch, K)  # as its teacher policy would answer
    batch |= {f"teacher_{name}": each for name, each in told.items()}
    sums, counts = 0.0, 0
    for rank in range(2):
        part = nemo_rl.context_parallel_part(batch, size=2, rank=rank)
        loss_sum, count = tl.losses.forward_kl(
            student(part["input_ids"]),
            nemo_rl.to_targets(part),
            nemo_rl.position_mask(part),
            tail=tl.losses.Tail.RENORMALISED,  # its keys do not have the mass outside the K ids
        )
        sums, counts = sums + float(loss_sum.detach()), counts + int(count)
    return sums / counts


def verl_loss(session: tl.Session, student: torch.nn.Module) -> float:
    """Fill a batch as verl's agent loop does, nested and without padding."""
    rows = [torch.tensor([1, 2, 3, 1, 2, 3]), torch.tensor([4, 4, 4])]
    lengths = torch.tensor([6, 3])
    with session.score(rows).result() as payload:
        batch = verl.to_batch(payload.targets, lengths, with_tail=True)
    responses = [torch.ones(4, dtype=torch.int64), torch.ones(2, dtype=torch.int64)]
    batch["response_mask"] = torch.nested.as_nested_tensor(responses, layout=torch.jagged)
    loss_sum, count = tl.losses.forward_kl(
        student(torch.cat(rows)), verl.to_targets(batch), verl.position_mask(batch, lengths)
    )
    return float(loss_sum.detach()) / int(count)


def main(address: str) -> list[float]:
    """Return what an untaught student loses in either, in nats a token."""
    torch.manual_seed(0)
    student = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=2)
    profile = tl.StudentProfile(batch_grid=grid, top_k=K)
    with tl.connect(address) as client, client.open_session(profile) as session:
        return [nemo_rl_loss(session, student), verl_loss(session, student)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python rl_batches.py ADDRESS      such as unix:/tmp/own/teacher.sock")
    try:
        found = main(sys.argv[1])
    except tl.errors.TeacherLogitsError as error:  # nobody answers there, for one
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.write(f"NeMo RL {found[0]:.3f}, verl {found[1]:.3f} nats a token\n")
