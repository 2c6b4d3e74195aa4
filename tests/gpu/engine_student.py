"""A student of the server's own engine, in a process of its own. It is no test.

python -m tests.gpu.engine_student DRIVER ORDINAL ADDRESS, then lines of JSON; see
``rig.answer_lines``.
"""

from __future__ import annotations

import sys
import time

import torch
from tests.gpu.rig import CUDA, Numbers, answer_lines, memory_of
from tests.gpu.student import digest
from tests.gpu.tiny_teacher import VOCABULARY, rows_of

import teacher_logits_client as tl

TOP_K = 256
SAMPLED = 8
"""Entries of a position that are compared with the teacher's own."""
PATIENCE_SECONDS = 60.0
COLUMNS = ("topk_ids", "topk_logprobs", "log_tail", "logsumexp")


class EngineStudent:
    """One session with the engine, and what is held of it."""

    def __init__(self, driver: str, ordinal: int, address: str) -> None:
        self._device = torch.device("cuda", ordinal) if driver == CUDA else torch.device("cpu")
        if driver == CUDA:
            torch.cuda.set_device(self._device)
        self._client = tl.connect(address, device_memory=memory_of(driver))
        self._session: tl.Session | None = None
        self._held: tl.LeasedPayload | None = None

    def open(self, transport: str, mode: str = "cow") -> Numbers:
        """Be admitted with one transport."""
        grid = tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
        profile = tl.StudentProfile(
            batch_grid=grid, top_k=TOP_K, transports=(tl.Transport(transport),)
        )
        self._session = self._client.open_session(profile, mode=tl.MapMode(mode))
        settled = self._session.transport
        return {
            "transport": settled.value if settled else "",
            "refusals": [f"{each.transport.value}: {each.message}" for each in self.refusals()],
        }

    def refusals(self) -> tuple[tl.Refusal, ...]:
        """Return what the session was refused."""
        return () if self._session is None else self._session.refusals

    def score(self, rows: int, tokens: int) -> Numbers:
        """Have rows scored, and keep them."""
        assert self._session is not None
        asked = rows_of(rows, tokens)
        started = time.perf_counter()
        self._held = self._session.score(asked, timeout=PATIENCE_SECONDS).result()
        column = self._held.columns["topk_ids"]
        return {
            "us": round((time.perf_counter() - started) * 1e6, 1),
            "transport": self._held.transport.value,
            "device": str(column.device),
            "is_pinned": column.is_pinned() if torch.cuda.is_available() else False,
            "positions": len(column),
        }

    def digests(self) -> Numbers:
        """Return a digest of each column, behind a copy to the student's device and back."""
        columns = self._payload().columns
        copies = {
            name: columns[name].to(self._device, non_blocking=True, copy=True) for name in COLUMNS
        }
        return {name: digest(copy) for name, copy in copies.items()}

    def sample(self, positions: int) -> Numbers:
        """Return the best entries of some first positions, as they are on the wire's types."""
        columns = self._payload().columns
        return {
            "ids": columns["topk_ids"][:positions, :SAMPLED].tolist(),
            "logprobs": columns["topk_logprobs"][:positions, :SAMPLED].float().tolist(),
        }

    def train(self) -> Numbers:
        """Take a loss and its gradient on the student's device; say where and how large."""
        targets = self._payload().targets.to(self._device)
        logits = torch.zeros(
            self._payload().payload.position_count,
            VOCABULARY,
            device=self._device,
            requires_grad=True,
        )
        loss, count = tl.losses.forward_kl(logits, targets)
        (loss / count).backward()
        assert logits.grad is not None
        return {
            "loss": float(loss / count),
            "gradient": float(logits.grad.norm()),
            "device": str(logits.grad.device),
        }

    def close(self) -> Numbers:
        """Give it back."""
        self._payload().close()
        self._held = None
        return {}

    def leave(self) -> Numbers:
        """End the session."""
        assert self._session is not None
        self._session.close()
        return {}

    def _payload(self) -> tl.LeasedPayload:
        assert self._held is not None
        return self._held


def main(driver: str, ordinal: str, address: str) -> None:
    """Work until standard input ends."""
    student = EngineStudent(driver, int(ordinal), address)
    names = ("open", "score", "digests", "sample", "train", "close", "leave")
    answer_lines({name: getattr(student, name) for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
