"""Reads that a stream was given, and does when it is waited for; a part of ``work.Work``."""

from __future__ import annotations

import ctypes

import torch
from tests.cuda.reading import Reading


class LateReading(Reading):
    """What kernels of a student's would read of a step, behind the call that gave them."""

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[int, torch.Tensor] = {}

    def read_late(self, step: int, name: str) -> None:
        """Give the stream a read of a held step's column; it is done when it is waited for."""
        self._enqueue_read(step, self._batches[step].columns[name])

    def read_late_kept(self, step: int, name: str) -> None:
        """Give the stream a read of a kept view."""
        self._enqueue_read(step, self._kept[name])

    def _enqueue_read(self, step: int, column: torch.Tensor) -> None:
        # By address, as a kernel has it: what a stream was given keeps no tensor alive.
        address, size, dtype = column.data_ptr(), column.nbytes, column.dtype

        def read() -> None:
            raw = bytearray(ctypes.string_at(address, size))
            self._late[step] = torch.frombuffer(raw, dtype=dtype)

        self.driver.enqueue(read, device=self.device)

    def check_late(self, step: int, name: str) -> None:
        """Wait for such a read, and hold what it saw against the bits."""
        self.driver.synchronise(device=self.device)
        right = self.teaching.right(step, range(self.teaching.rows))[name]
        seen = self._late.pop(step)
        assert torch.equal(seen, right.flatten()), f"step {step}: {name} was read as {seen}"

    def late(self) -> list[list[float]]:
        """Return what such reads that were done saw."""
        return [each.tolist() for each in self._late.values()]
