"""The other process of the driver's stages: makes memory, opens it, reads it. It is no test.

python -m tests.gpu.peer DRIVER ORDINAL, then lines of JSON; see ``rig.answer_lines``.
"""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from tests.gpu.rig import Numbers, Rig, answer_lines, pid_namespace

if TYPE_CHECKING:
    from teacher_logits.device_memory import ExportedMemory

CHUNK_BYTES = 64 << 20
FACTOR = 2654435761 - (1 << 32)
"""Spreads the pattern over all bits; int32 arithmetic wraps, on every device alike."""


def pattern(start: int, count: int, *, seed: int, device: torch.device) -> torch.Tensor:
    """Return words ``start`` to ``start + count`` of what memory is filled with."""
    words = torch.arange(start, start + count, dtype=torch.int32, device=device)
    return words.mul_(FACTOR).add_(seed)


def fill(words: torch.Tensor, *, seed: int) -> None:
    """Write the pattern."""
    step = CHUNK_BYTES // 4
    for start in range(0, len(words), step):
        part = words[start : start + step]
        part.copy_(pattern(start, len(part), seed=seed, device=words.device))


def wrong_words(words: torch.Tensor, *, seed: int) -> int:
    """Count the words that are not of the pattern."""
    step = CHUNK_BYTES // 4
    wrong = 0
    for start in range(0, len(words), step):
        part = words[start : start + step]
        expected = pattern(start, len(part), seed=seed, device=words.device)
        wrong += int((part != expected).sum())
    return wrong


class Worker:
    """What the peer has: allocations of its own, and what it has opened."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._memory = rig.memory
        self._device = rig.device

    def hello(self) -> Numbers:
        return {"pid_namespace": pid_namespace()}

    def warm_up(self) -> Numbers:
        """Have a context, so that what is timed next does not make one."""
        self._memory.synchronise(device=self._device)
        return {}

    def make(self, size_bytes: int, seed: int, offset_bytes: int = 0) -> Numbers:
        """Allocate, fill from an offset on, wait for the device, and export at the offset."""
        base = self._memory.allocate(offset_bytes + size_bytes, device=self._device)
        fill(self._rig.words(base + offset_bytes, size_bytes), seed=seed)
        self._memory.record(device=self._device).wait()
        return {"base": base, **as_json(self._memory.export(base + offset_bytes))}

    def free(self, base: int) -> Numbers:
        self._memory.free(base, device=self._device)
        return {}

    def open(self, handle: str) -> Numbers:
        started = time.perf_counter()
        base = self._memory.open(bytes.fromhex(handle), device=self._device)
        taken = round((time.perf_counter() - started) * 1e6, 1)
        place = self._memory.locate(base)
        return {
            "base": base,
            "us": taken,
            "kind": place.kind.name,
            "allocation_bytes": place.allocation_bytes,
        }

    def close(self, base: int) -> Numbers:
        started = time.perf_counter()
        self._memory.close(base, device=self._device)
        return {"us": round((time.perf_counter() - started) * 1e6, 1)}

    def check(self, address: int, size_bytes: int, seed: int) -> Numbers:
        """Compare opened memory with the pattern, on the device and in a copy of its start."""
        words = self._rig.words(address, size_bytes)
        started = bytearray(min(size_bytes, 1 << 20))
        self._memory.copy_to_host(memoryview(started), address, device=self._device)
        return {
            "wrong_words": wrong_words(words, seed=seed),
            "digest_of_first_mib": hashlib.sha256(started).hexdigest(),
        }

    def bandwidth(self, address: int, size_bytes: int, rounds: int) -> Numbers:
        """Read opened memory and memory of one's own in turn: GB/s of both, best of the rounds."""
        own = self._memory.allocate(size_bytes, device=self._device)
        theirs, ours = (self._rig.words(at, size_bytes) for at in (address, own))
        fill(ours, seed=1)
        best = {"opened": 0.0, "local": 0.0}
        for _ in range(rounds + 2):
            for name, words in (("local", ours), ("opened", theirs)):
                best[name] = max(best[name], self._read_rate(words))
        self._memory.free(own, device=self._device)
        return {f"{name}_gb_s": round(rate, 1) for name, rate in best.items()}

    def _read_rate(self, words: torch.Tensor) -> float:
        long = words.view(torch.int64)
        self._memory.synchronise(device=self._device)
        started = time.perf_counter()
        long.sum()
        self._memory.synchronise(device=self._device)
        return words.nbytes / (time.perf_counter() - started) / 1e9


def as_json(exported: ExportedMemory) -> Numbers:
    """Return what another process needs, as it is sent to one."""
    return {**asdict(exported), "handle": exported.handle.hex()}


def main(driver: str, ordinal: str) -> None:
    """Work until standard input ends."""
    rig = Rig.of(driver, ordinal=int(ordinal), other_pythons=())
    assert rig is not None
    worker = Worker(rig)
    names = ("hello", "warm_up", "make", "free", "open", "close", "check", "bandwidth")
    answer_lines({name: getattr(worker, name) for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
