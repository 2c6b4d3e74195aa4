"""A student that learns from every step of a teacher, in whatever process it is.

python -m tests.ray.learning ADDRESS TEACHER STUDENT     says "admitted", learns, says a JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass

import torch
from tests.client.publishing.a_publisher import VOCABULARY, a_student, some_rows

import teacher_logits_client as tl
from teacher_logits.tensors import to_bytes

STEPS = 20
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Learned:
    """How a student was served, and what it came to."""

    transport: str
    losses: list[float]
    weights: str


class Learning:
    """A student of one rank, admitted. The loss is that of a table of logits by the last token."""

    def __init__(self, address: str, *, teacher_id: str, student_id: str) -> None:
        torch.set_num_threads(1)
        self._client = tl.connect(address)
        profile = a_student(teacher_id, student_id=student_id)
        self._session = self._client.open_session(profile, timeout=PATIENCE_SECONDS)

    def admitted(self) -> str:
        """Return over what it will be served."""
        return _name(self._session.transport)

    def learn(self) -> Learned:
        """Take all steps, and leave."""
        table = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
        optimizer = torch.optim.SGD([table], lr=0.1)
        losses = []
        with self._client, self._session as session:
            for step in range(STEPS):
                ids, lengths, _ = some_rows(step)
                optimizer.zero_grad()
                with session.acquire(
                    step=step, input_ids=ids, lengths=lengths, timeout=PATIENCE_SECONDS
                ) as batch:
                    for micro_batch in batch.micro_batches():
                        logits = table[ids[micro_batch.index]]
                        loss, count = tl.losses.forward_kl(logits, micro_batch.targets)
                        (loss / count).backward()
                        losses.append(loss.item())
                optimizer.step()
            return Learned(
                transport=_name(session.transport),
                losses=losses,
                weights=hashlib.sha256(to_bytes(table.detach())).hexdigest(),
            )


def _name(transport: tl.Transport | None) -> str:
    return "none" if transport is None else transport.value


def main() -> None:
    address, teacher_id, student_id = sys.argv[1:]
    learning = Learning(address, teacher_id=teacher_id, student_id=student_id)
    say("admitted")
    say(json.dumps(asdict(learning.learn())))


def say(line: str) -> None:
    """Write a line that the test waits for."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
