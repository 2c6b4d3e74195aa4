"""What every worker has: a driver, a client, and what it is to say of itself.

``Publishing`` and ``Reading`` are the two sides over it; ``work.Work`` is all of them together.
"""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cuda.teaching import Teaching
from tests.fake_cuda.spec import Spec

import teacher_logits_client as tl
from teacher_logits.devices.left_over import left_over_count

if TYPE_CHECKING:
    import torch
    from tests.fake_cuda.driver import FakeCuda

    from teacher_logits.device_memory import Device

PATIENCE_SECONDS = 30.0

Facts = dict[str, object]


class Desk:
    """One process's driver and client."""

    def __init__(self) -> None:
        self.fake: FakeCuda | None = None
        self.teaching = Teaching()
        self._stack = ExitStack()
        self._client: tl.Client | None = None
        #: Tensors that were told to be kept, by name.
        self._kept: dict[str, torch.Tensor] = {}

    def connect(self, address: str, spec: str | None, timeout: float = PATIENCE_SECONDS) -> None:
        """Connect, with a driver that a spec describes, or none."""
        given: Facts = {"timeout": timeout}
        if spec is not None:
            told = Spec.loads(spec)
            self.fake = told.fake()
            given["device_memory"] = told.around(self.fake)
        self._client = self._stack.enter_context(
            tl.connect(address, **given)  # type: ignore[arg-type]
        )

    def left_over(self) -> int:
        """Return how many slabs that were given up wait for their readers."""
        gc.collect()
        return left_over_count()

    def settle(self) -> None:
        """Wait until all that is to be given back was."""
        self._stack.close()
        gc.collect()

    def fail_to_close(self) -> None:
        """Have ``reset`` fail."""
        self._stack.callback(self._kept.__getitem__, "what is not there")

    def fork(self) -> None:
        """Fork a child that does nothing until it is ended."""
        reading, self._fork_ends = os.pipe()
        self._fork = os.fork()
        if not self._fork:
            os.close(self._fork_ends)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)

    def end_fork(self) -> None:
        """End it."""
        os.close(self._fork_ends)
        os.waitpid(self._fork, 0)

    def statistics(self) -> Facts:
        """Return the client's statistics."""
        return asdict(self.client.statistics())

    def census(self) -> Facts:
        """Return how many descriptors are open, and what device memory and slabs are mapped."""
        gc.collect()
        names = [
            line.split(maxsplit=5)[5]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:" in line
        ]
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "device": sum("fake-cuda" in name for name in names),
            "slabs": sum("teacher-logits" in name for name in names),
        }

    # --- within -------------------------------------------------------------

    @property
    def client(self) -> tl.Client:
        """The client."""
        assert self._client is not None
        return self._client

    @property
    def driver(self) -> FakeCuda:
        """The driver."""
        assert self.fake is not None
        return self.fake

    @property
    def device(self) -> Device:
        """The first device."""
        return self.driver.devices()[0]


def plain(refusals: tuple[tl.Refusal, ...]) -> list[Facts]:
    """Return refusals as plain values."""
    return [
        {
            "transport": each.transport.value,
            "reason": each.reason.value,
            "message": each.message,
            "writer_id": each.writer_id,
        }
        for each in refusals
    ]
