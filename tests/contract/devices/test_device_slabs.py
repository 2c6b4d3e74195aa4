"""Slabs of a device in the making: what is taken stays below a budget, whatever readers do."""

from __future__ import annotations

import fcntl
import os
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
from tests.fake_cuda.log import leaked, read_log
from tests.fake_cuda.spec import Spec
from tests.held import left_behind, open_descriptors

from teacher_logits.devices import slab as device_slab
from teacher_logits.devices.left_over import open_lock
from teacher_logits.devices.slab import DeviceSlab
from teacher_logits.devices.slabs import DeviceSlabs
from teacher_logits.errors import PoolFullError, SlabOpenError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE = 4096
LONG = 30.0


def slabs(folder: Path, *, pages: int, memory_bytes: int | None = None) -> DeviceSlabs[DeviceSlab]:
    memory = Spec(folder=str(folder), memory_bytes=memory_bytes).memory()
    device = memory.devices()[0]

    def new(slab_id: str, size_bytes: int, when_freed: Callable[[], None]) -> DeviceSlab:
        return DeviceSlab(slab_id, size_bytes, memory=memory, device=device, when_freed=when_freed)

    return DeviceSlabs(
        new,
        device=device,
        budget_bytes=pages * PAGE,
        budget_name="--budget",
        way_out="lower it",
    )


def opened(slab: DeviceSlab) -> int:
    """Have a slab open as a reader has; close what is returned to let go."""
    lock = open_lock(slab.fd)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def test_a_slab_may_be_just_large_enough_where_the_device_is_nearly_full(tmp_path: Path) -> None:
    slab = slabs(tmp_path, pages=8, memory_bytes=3 * PAGE).make("slab", 4 * PAGE, PAGE + 1)
    assert slab.device_bytes == 2 * PAGE
    slab.close()


def test_memory_that_the_device_does_not_have_is_a_full_pool_with_the_numbers(
    tmp_path: Path,
) -> None:
    made = slabs(tmp_path, pages=8, memory_bytes=2 * PAGE)
    with pytest.raises(PoolFullError, match=r"OUT_OF_MEMORY.*: lower it") as caught:
        made.make("slab", 4 * PAGE, 3 * PAGE)
    assert caught.value.facts["need_bytes"] == 3 * PAGE
    assert caught.value.facts["left_over_bytes"] == 0
    made.make("small", PAGE, PAGE).close()
    assert leaked(read_log(tmp_path)) == set()


def test_what_was_given_up_and_is_open_counts_until_its_reader_lets_go(tmp_path: Path) -> None:
    made = slabs(tmp_path, pages=3)
    freed: SimpleQueue[None] = SimpleQueue()
    made.on_freed(lambda: freed.put(None))
    first = made.make("first", 2 * PAGE, PAGE)
    reader = opened(first)
    first.close()
    assert made.left_over_bytes == 2 * PAGE

    second = made.make("second", 2 * PAGE, PAGE)
    assert second.device_bytes == PAGE
    with pytest.raises(PoolFullError, match="8192 bytes of slabs that were given up") as caught:
        made.make("third", PAGE, PAGE)
    assert "--budget" in caught.value.message
    assert caught.value.facts["left_over_bytes"] == 2 * PAGE
    assert caught.value.facts["budget_bytes"] == 3 * PAGE

    os.close(reader)
    freed.get(timeout=LONG)
    assert made.left_over_bytes == 0
    for slab in (second, made.make("third", 2 * PAGE, PAGE)):
        slab.close()
    assert made.left_over_bytes == 0
    assert leaked(read_log(tmp_path)) == set()


def test_slabs_that_were_given_up_leave_no_descriptor(tmp_path: Path) -> None:
    """A server that makes slabs of one size after another has no more of them after weeks."""
    made = slabs(tmp_path, pages=2)
    made.make("warm", PAGE, PAGE).close()
    before = open_descriptors()
    for number in range(20):
        made.make(f"slab-{number}", PAGE, PAGE).close()
    assert not left_behind(before, open_descriptors)


def test_a_twin_that_cannot_be_locked_is_a_full_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> int:
        raise SlabOpenError("a twin cannot be opened anew")

    made = slabs(tmp_path, pages=2)
    monkeypatch.setattr(device_slab, "open_lock", refuse)
    with pytest.raises(PoolFullError, match="opened anew"):
        made.make("slab", PAGE, PAGE)
    assert leaked(read_log(tmp_path)) == set()


def test_a_slab_that_could_not_be_made_takes_nothing_of_the_budget(tmp_path: Path) -> None:
    made = slabs(tmp_path, pages=4, memory_bytes=3 * PAGE)
    for _ in range(3):
        with pytest.raises(PoolFullError):
            made.make("large", 4 * PAGE, 4 * PAGE)
    made.make("small", 3 * PAGE, PAGE).close()
