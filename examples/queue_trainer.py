"""A trainer on TransferQueue that learns from a served teacher, and gets no tensor by its driver.

    ray start --head                                        (or any cluster that you have)
    python queue_trainer.py unix:/tmp/own/teacher.sock      (own_engine.py starts one there)

Driver, teacher and student are functions of one process here. In a cluster each is an actor's,
which attaches for itself, and only row metadata and numbers pass between them. Needs
teacher-logits[transfer-queue].
"""

from __future__ import annotations

import sys
from functools import partial

import ray
import torch
import transfer_queue

import teacher_logits_client as tl
from teacher_logits_client.data_plane.fields import TopKForm
from teacher_logits_client.data_plane.jagged import pack_jagged
from teacher_logits_client.data_plane.padded import pad_jagged
from teacher_logits_client.data_plane.presharded import RankRows, Turn, run_presharded
from teacher_logits_client.data_plane.row_meta import RowMeta
from teacher_logits_client.data_plane.row_store import cleared_at_end
from teacher_logits_client.data_plane.teacher_fields import teacher_fields
from teacher_logits_client.data_plane.transfer_queue import TransferQueueStore, attach
from teacher_logits_client.data_plane.write_back import join_replies
from teacher_logits_client.trainers import nemo_rl

VOCABULARY, K = 256, 8
FORM = TopKForm(k=K)
OWN_FIELDS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


def mint_rows(store: TransferQueueStore, step: int) -> RowMeta:
    """The driver's part: the step's rows, each under a key of its own."""
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2], [4, 4, 4, 4, 4, 0, 0, 0]])
    lengths = torch.tensor([8, 5])
    meta = RowMeta(
        partition_id="train",
        sample_ids=tuple(f"{step}-{row}" for row in range(2)),
        sequence_lengths=(8, 5),
    ).with_pad_target(4)
    own = {
        "input_ids": ids,
        "input_lengths": lengths,
        "token_mask": (torch.arange(8) < lengths[:, None]).int(),
        "sample_mask": torch.ones(2),
    }
    store.register(meta.partition_id, FORM.specs)
    store.add_rows(meta, pack_jagged(own, lengths))
    return meta


def ask_teacher(session: tl.Session, rows: RankRows) -> dict[str, torch.Tensor]:
    """What a teacher's rank runs on its rows: here, a question to the served one."""
    future = session.score(rows.fields["input_ids"], lengths=rows.lengths)
    with future.result(timeout=30) as payload:
        return teacher_fields(payload, rows.lengths, FORM)


def learn(store: TransferQueueStore, meta: RowMeta, student: torch.nn.Module) -> float:
    """The student's part: the loss a token, in nats, its gradients behind it."""
    read = store.read(meta, FORM.train_fields(OWN_FIELDS))
    batch = pad_jagged(read, pad_to_seqlen=meta.pad_to_seqlen).fields
    loss_sum, count = tl.losses.forward_kl(
        student(batch["input_ids"]), nemo_rl.to_targets(batch), nemo_rl.position_mask(batch)
    )
    (loss_sum / count).backward()
    return float(loss_sum.detach() / count)


def main(address: str, steps: int = 3) -> list[float]:
    """Train an untaught student for some steps; return its losses."""
    ray.init(address="auto", ignore_reinit_error=True)
    transfer_queue.init()
    torch.manual_seed(0)
    student = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.1)
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=2)
    profile = tl.StudentProfile(batch_grid=grid, top_k=K)
    turn = Turn(select_fields=["input_ids"], writes=FORM.specs)
    losses = []
    with attach() as store, tl.connect(address) as client, client.open_session(profile) as session:
        for step in range(steps):
            meta = mint_rows(store, step)
            with cleared_at_end(store, meta):
                reply = run_presharded(store, meta, partial(ask_teacher, session), turn)
                losses.append(learn(store, meta, student))
            report = join_replies([reply])
            sys.stdout.write(f"{report.write_bytes} bytes, {losses[-1]:.3f} nats a token\n")
            optimizer.step()
            optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python queue_trainer.py ADDRESS      such as unix:/tmp/own/teacher.sock")
    try:
        main(sys.argv[1])
    except tl.errors.TeacherLogitsError as error:  # nobody answers there, for one
        sys.exit(f"{type(error).__name__}: {error}")
