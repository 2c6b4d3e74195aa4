"""A teacher's top-k from its Ray workers to a student's, past the driver; no server of ours.

    python ray_deferred.py

Ray listens on every interface of the machine. Where a cluster runs already, it is used.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import torch

import teacher_logits_client as tl
from teacher_logits_client.ray import (
    DeferredPayload,
    DeferredTeacher,
    HandedOver,
    Side,
    StepPlan,
    agree,
    attach,
    fetch,
    hand_over,
)
from teacher_logits_client.trainers import nemo_rl

VOCABULARY, K, ROWS, POSITIONS = 64, 8, 8, 12


def model_of(seed: int) -> torch.nn.Module:
    """Return a model that says of a token what it likes behind it."""
    torch.manual_seed(seed)
    return torch.nn.Embedding(VOCABULARY, VOCABULARY)


class TeacherWorker:
    """One data-parallel rank of the teacher."""

    def __init__(self, rank: int) -> None:
        self._model = model_of(1)
        self._deferred = DeferredTeacher(data_parallel_rank=rank, vocabulary_size=VOCABULARY)

    def top_k(self, step: int, rows: tuple[int, ...], ids: torch.Tensor) -> DeferredPayload:
        """Score the rows, leave the payload here, and say what it is."""
        with torch.no_grad():
            values, indices = self._model(ids).topk(K)
        told = {"topk_logits": values, "topk_indices": indices}
        return self._deferred.put(told, step=step, rows=rows, input_ids=ids)


class StudentWorker:
    """One data-parallel rank of the student; a trainer's own would reduce its gradients."""

    def __init__(self) -> None:
        self._model = model_of(2)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=0.1)

    def train(self, step: int, rows: tuple[int, ...], ids: torch.Tensor, payload: object) -> float:
        """Learn the rows. Ray has put the payload in the place of its reference by now."""
        batch: dict[str, object] = {
            "input_ids": ids,
            "token_mask": torch.ones_like(ids),
            "sample_mask": torch.ones(len(ids)),
        }
        attach(batch, payload, step=step, rows=rows, top_k=K, vocabulary_size=VOCABULARY)
        loss_sum, count = tl.losses.forward_kl(
            self._model(ids),
            nemo_rl.to_targets(batch),
            nemo_rl.position_mask(batch),
            tail=tl.losses.Tail.RENORMALISED,
        )
        self._optimizer.zero_grad()
        (loss_sum / count).backward()
        self._optimizer.step()
        return float(loss_sum.detach()) / int(count)


def main(*, steps: int = 30, ranks: int = 2) -> tuple[HandedOver, list[float]]:
    """Return how the last step's payloads came over, and what the student lost in each step."""
    ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False)
    teacher_actor: Any = ray.remote(TeacherWorker)
    student_actor: Any = ray.remote(StudentWorker)
    teachers = [teacher_actor.remote(rank) for rank in range(ranks)]
    students = [student_actor.remote() for _ in range(ranks)]
    side = Side(data_parallel_size=ranks, global_batch_size=ROWS)
    losses = []
    for step in range(steps):
        ids = torch.randint(0, VOCABULARY, (ROWS, POSITIONS))
        agreement = agree(
            StepPlan(row_count=ROWS, student=side, teacher=side, sequence_length=POSITIONS,
                     top_k=K, vocabulary_size=VOCABULARY)
        )  # fmt: skip
        answers = [
            worker.top_k.remote(step, rows, ids[list(rows)])
            for worker, rows in zip(teachers, agreement.teacher_rows, strict=True)
        ]
        handed = hand_over(answers, agreement, step=step)
        learnt = [
            worker.train.remote(step, rows, ids[list(rows)], payload)  # an argument of its own
            for worker, rows, payload in zip(
                students, agreement.student_rows, handed.arguments, strict=True
            )
        ]
        told = [float(str(each)) for each in fetch(learnt, what=f"the student's step {step}")]
        losses.append(sum(told) / ranks)
    return handed, losses


if __name__ == "__main__":
    if len(sys.argv) != 1:
        sys.exit("usage: python ray_deferred.py      with RAY_ADDRESS set, or a cluster of its own")
    last, lost = main()
    sys.stdout.write(
        f"{last.path.value}: {lost[0]:.3f} nats a token at first, {lost[-1]:.3f} at last\n"
    )
