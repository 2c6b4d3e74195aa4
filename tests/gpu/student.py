"""A student of the service's stages, in a process of its own. It is no test.

python -m tests.gpu.student DRIVER ORDINAL ADDRESS, then lines of JSON; see ``rig.answer_lines``.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
from tests.gpu.rig import CUDA, Numbers, answer_lines, memory_of
from tests.gpu.teacher import ROWS, TOP_K, wrong_entries

import teacher_logits_client as tl
from teacher_logits.tensors import to_bytes

IN_HAND = ("topk_ids", "topk_logprobs", "log_tail")
PATIENCE_SECONDS = 60.0


class Student:
    """Sessions by their teachers' names, and what is held of them."""

    def __init__(self, driver: str, ordinal: int, address: str) -> None:
        self._memory = memory_of(driver)
        self._device = torch.device("cuda", ordinal) if driver == CUDA else torch.device("cpu")
        if driver == CUDA:
            torch.cuda.init()
        self._client = tl.connect(address, device_memory=self._memory)
        self._sessions: dict[str, tl.Session] = {}
        self._held: dict[str, tl.Batch] = {}

    def open(
        self, teacher: str, transports: str = "cuda_ipc", mode: str = "cow", top_k: int = TOP_K
    ) -> Numbers:
        """Be admitted; ``transports`` with commas between."""
        profile = tl.StudentProfile(
            teacher_id=teacher,
            student_id=f"student-{os.getpid()}",
            batch_grid=tl.BatchGrid(
                global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=1
            ),
            top_k=top_k,
            transports=tuple(tl.Transport(name) for name in transports.split(",")),
        )
        session = self._client.open_session(profile, mode=tl.MapMode(mode))
        self._sessions[teacher] = session
        return {
            "transport": session.transport.value if session.transport else "",
            "refusals": [f"{each.transport.value}: {each.message}" for each in session.refusals],
        }

    def acquire(self, teacher: str, step: int, *, look: bool = False) -> Numbers:
        """Time a step from the call to tensors in hand, and keep it; ``look`` reads all of it."""
        started = time.perf_counter()
        batch = self._sessions[teacher].acquire(step=step, timeout=PATIENCE_SECONDS)
        columns = batch.columns
        in_hand = [columns[name] for name in IN_HAND]
        taken = (time.perf_counter() - started) * 1e6
        self._held[teacher] = batch
        said: Numbers = {
            "us": round(taken, 1),
            "device": str(in_hand[0].device),
            "transport": sorted({each.value for each in batch.transports.values()}),
            "positions": len(in_hand[0]),
        }
        if look:
            said["wrong"] = wrong_entries(columns, step)
        return said

    def look(self, teacher: str, step: int) -> Numbers:
        """Read all of what is held."""
        return {"wrong": wrong_entries(self._held[teacher].columns, step)}

    def fails(self, teacher: str, step: int) -> Numbers:
        """Acquire what cannot be had, and say with which error that ends."""
        try:
            self._sessions[teacher].acquire(step=step, timeout=PATIENCE_SECONDS)
        except tl.errors.TeacherLogitsError as error:
            return {"kind": type(error).__name__}
        raise AssertionError("the step was acquired")

    def digests(self, teacher: str) -> Numbers:
        """Return a digest of each column that is held, as it is on the device."""
        columns = self._held[teacher].columns
        return {name: digest(columns[name]) for name in IN_HAND}

    def to_device(self, teacher: str, rounds: int) -> Numbers:
        """Time copies of what is held in host memory to the device: GB/s, the best."""
        column = self._held[teacher].columns["topk_logprobs"]
        target = torch.empty_like(column, device=self._device)
        best = 0.0
        for _ in range(rounds):
            started = time.perf_counter()
            target.copy_(column, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            best = max(best, column.nbytes / (time.perf_counter() - started) / 1e9)
        return {"gb_s": round(best, 2), "is_pinned": column.is_pinned()}

    def close(self, teacher: str) -> Numbers:
        """Give a step back."""
        started = time.perf_counter()
        self._held.pop(teacher).close()
        return {"us": round((time.perf_counter() - started) * 1e6, 1)}

    def cycle(self, teacher: str, step: int) -> Numbers:
        """Acquire, look at one entry, give back."""
        said = self.acquire(teacher, step)
        self.close(teacher)
        return said

    def leave(self, teacher: str) -> Numbers:
        """End a session."""
        self._sessions.pop(teacher).close()
        return {}

    def about(self) -> Numbers:
        """Say what this process has."""
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        }


def digest(column: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes."""
    return hashlib.sha256(to_bytes(column.cpu())).hexdigest()


def main(driver: str, ordinal: str, address: str) -> None:
    """Work until standard input ends."""
    student = Student(driver, int(ordinal), address)
    names = (
        "open",
        "acquire",
        "look",
        "fails",
        "digests",
        "to_device",
        "close",
        "cycle",
        "leave",
        "about",
    )
    answer_lines({name: getattr(student, name) for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
