"""A student that learns from a served teacher, rows of differing lengths and all.

    python train.py unix:/tmp/own/teacher.sock      (own_engine.py starts one there)

The student is one table of next-token logits, so that the file is about the hand-over: scores
are asked for ahead of the step that needs them, and each lease ends before the next step.
"""

from __future__ import annotations

import sys

import torch

import teacher_logits_client as tl

ROWS, WIDTH, STEPS, AHEAD = 8, 32, 30, 3


def batches(vocabulary_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return token ids [ROWS, WIDTH], padded at the right, and the true lengths [ROWS]."""
    chance = torch.Generator().manual_seed(0)
    size = min(vocabulary_size, 32)
    return [
        (
            torch.randint(0, size, (ROWS, WIDTH), generator=chance),
            torch.randint(2, WIDTH + 1, (ROWS,), generator=chance),
        )
        for _ in range(STEPS)
    ]


def main(address: str) -> list[float]:
    """Train, and return the loss of each step in nats a position."""
    losses: list[float] = []
    profile = tl.StudentProfile(
        batch_grid=tl.BatchGrid(
            global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=ROWS
        ),
        top_k=16,
    )
    with tl.connect(address) as client, client.open_session(profile) as session:
        vocabulary_size = session.terms.vocabulary_size
        student = torch.nn.Embedding(vocabulary_size, vocabulary_size)
        optimizer = torch.optim.Adam(student.parameters(), lr=0.1)
        data = batches(vocabulary_size)
        waiting = [session.score(ids, lengths=lengths) for ids, lengths in data[:AHEAD]]
        for step, (ids, lengths) in enumerate(data):
            with waiting.pop(0).result() as payload:
                if step + AHEAD < STEPS:
                    more, their_lengths = data[step + AHEAD]
                    waiting.append(session.score(more, lengths=their_lengths))
                mask = torch.arange(WIDTH) < lengths[:, None] - 1  # a last token has no next one
                loss_sum, count = tl.losses.forward_kl(student(ids), payload.targets, mask)
                (loss_sum / count).backward()
            optimizer.step()  # after the lease's last check
            optimizer.zero_grad()
            losses.append(float(loss_sum.detach() / count))
    return losses


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python train.py ADDRESS      such as unix:/tmp/own/teacher.sock")
    try:
        found = main(sys.argv[1])
    except tl.errors.TeacherLogitsError as error:  # nobody answers there, for one
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.write(f"loss {found[0]:.3f} -> {found[-1]:.3f} nats a position\n")
