"""A probe: one a process and device, written before it is shown, and never freed."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.faulty import Fault, FaultyMemory
from tests.fake_cuda.log import done, still_allocated
from tests.fake_cuda.visible import MIG_GPU, ONE_GPU, OTHER_GPU

from teacher_logits.device_memory import PROBE_BYTES, DeviceError
from teacher_logits.devices.probe import Probe, probe_of

if TYPE_CHECKING:
    from pathlib import Path


def test_is_the_same_for_every_writer_of_a_process(tmp_path: Path) -> None:
    memory = FakeCuda(tmp_path)
    (device,) = memory.devices()

    assert probe_of(memory, device) == probe_of(memory, device)
    assert len(done(memory.log.operations, "export")) == 1
    assert done(memory.log.operations, "free") == []


def test_is_another_on_another_device(tmp_path: Path) -> None:
    memory = FakeCuda(tmp_path, devices=(ONE_GPU, OTHER_GPU))
    one, other = (probe_of(memory, each) for each in memory.devices())

    assert one.exported.device_uuid != other.exported.device_uuid
    assert one.challenge != other.challenge


def test_has_its_challenge_where_it_begins(tmp_path: Path) -> None:
    memory = FakeCuda(tmp_path)
    probe = probe_of(memory, memory.devices()[0])
    found = bytearray(PROBE_BYTES)
    address = done(memory.log.operations, "allocate")[0].address
    memory.copy_to_host(memoryview(found), address, device=memory.devices()[0])

    assert bytes(found) == probe.challenge


def test_that_two_threads_make_at_once_is_one(tmp_path: Path) -> None:
    memory = FakeCuda(tmp_path)
    (device,) = memory.devices()
    both = threading.Barrier(2)

    class Meeting(FaultyMemory):
        def allocate(self, size_bytes: int, *, device: object) -> int:
            both.wait()
            return self.inner.allocate(size_bytes, device=device)  # type: ignore[arg-type]

    meeting = Meeting(memory, ())
    found: list[Probe] = []
    threads = [
        threading.Thread(target=lambda: found.append(probe_of(meeting, device))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found[0] == found[1]
    assert len(still_allocated(memory.log.operations)) == 1


def test_that_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    memory = FakeCuda(tmp_path, devices=(MIG_GPU,))
    with pytest.raises(DeviceError, match="801"):
        probe_of(memory, memory.devices()[0])

    assert still_allocated(memory.log.operations) == set()


def test_that_was_refused_once_is_tried_again(tmp_path: Path) -> None:
    memory = FaultyMemory(FakeCuda(tmp_path), (Fault(call="export", error=999, times=1),))
    (device,) = memory.devices()
    with pytest.raises(DeviceError, match="999"):
        probe_of(memory, device)

    assert probe_of(memory, device).exported.device_uuid == device.uuid


def test_keeps_no_driver_alive(tmp_path: Path) -> None:
    memory = FakeCuda(tmp_path)
    probe_of(memory, memory.devices()[0])
    left = weakref.ref(memory)
    del memory
    gc.collect()

    assert left() is None
