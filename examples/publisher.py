"""A teacher in a process of its own, which hands over what it has scored, and its student.

    teacher-logits serve --listen unix:/tmp/pub/teacher.sock   # no model: for what is published
    python publisher.py teach unix:/tmp/pub/teacher.sock
    python publisher.py learn unix:/tmp/pub/teacher.sock

Teacher and student take the same rows of the same batches. On one machine the student reads
the teacher's own memory; elsewhere the bytes travel, and the code is the same. Either may come
first: the student waits for its teacher, and the teacher, once it is some steps ahead, for room.
"""

from __future__ import annotations

import sys

import torch

import teacher_logits_client as tl

VOCABULARY, ROWS, WIDTH, STEPS, K = 64, 8, 24, 3, 8
GRID = tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=4)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids [ROWS, WIDTH], padded at the right, their true lengths [ROWS], and which
    positions are learnt [ROWS, WIDTH]: a last token has no next one."""
    chance = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=chance)
    lengths = torch.randint(2, WIDTH + 1, (ROWS,), generator=chance)
    return ids, lengths, torch.arange(WIDTH) < lengths[:, None] - 1


def teach(address: str) -> None:
    """Publish the steps, a micro batch at a time."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(VOCABULARY, VOCABULARY).requires_grad_(False)
    profile = tl.TeacherProfile(
        teacher_id="bigram",
        vocabulary_size=VOCABULARY,
        head_rows=VOCABULARY,
        top_k=K,
        max_row_tokens=WIDTH,
        batch_grid=GRID,
    )
    with tl.connect(address) as client, client.open_publisher(profile) as publisher:
        for step in range(STEPS):
            ids, lengths, mask = batch(step)
            with publisher.reserve(step, input_ids=ids, lengths=lengths, loss_mask=mask) as draft:
                for part in draft.micro_batches():
                    tl.select_top_k(model(ids[part.index]), out=part)
            # Sealed on leaving the block; abandoned where an error had left it.
            sys.stdout.write(f"step {step}: {draft.position_count} positions published\n")


def learn(address: str) -> list[float]:
    """Read the steps; return the loss of an untaught student at each, in nats a position."""
    student = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    losses: list[float] = []
    profile = tl.StudentProfile(teacher_id="bigram", batch_grid=GRID, top_k=K)
    with tl.connect(address) as client, client.open_session(profile, timeout=60) as session:
        for step in range(STEPS):
            ids, lengths, mask = batch(step)
            with session.acquire(step=step, input_ids=ids, lengths=lengths, timeout=60) as rows:
                loss_sum, _ = tl.losses.forward_kl(student(ids), rows.targets, mask)
                # Divided by what counts in the whole step, on however many ranks it is learnt.
                losses.append(float(loss_sum.detach()) / (rows.global_count or 1))
    return losses


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("teach", "learn"):
        sys.exit(
            "usage: python publisher.py teach|learn ADDRESS    such as unix:/tmp/pub/teacher.sock"
        )
    what, where = sys.argv[1:]
    try:
        if what == "teach":
            teach(where)
        else:
            sys.stdout.write(f"loss {', '.join(f'{loss:.3f}' for loss in learn(where))} nats\n")
    except tl.errors.TeacherLogitsError as error:  # nobody answers there, for one
        sys.exit(f"{type(error).__name__}: {error}")
