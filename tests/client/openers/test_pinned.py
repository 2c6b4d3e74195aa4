"""Pinned pages: host memory that a device copies from without a staging copy."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import pytest
from tests.client.openers.device_writer import NEVER, DeviceWriter
from tests.client.openers.test_openers import PAGE, Writer
from tests.fake_cuda.child import child
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.faulty import Fault, FaultyMemory, gate, let_go
from tests.fake_cuda.log import done, faults
from tests.fake_cuda.spec import Spec
from tests.fake_cuda.visible import ONE_GPU, OTHER_GPU
from tests.held import left_behind, open_descriptors
from tests.processes.test_fifty_steps import await_true

from teacher_logits.device_memory import Device, DeviceError, DeviceMemory
from teacher_logits.errors import ConfigError, DeadlinePassedError
from teacher_logits.slab import CONTROL_BYTES
from teacher_logits_client.config import MapMode
from teacher_logits_client.openers import devices, mapped_payload
from teacher_logits_client.openers.devices import Devices
from teacher_logits_client.openers.shared_memory import SharedMemoryOpener

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cuda(tmp_path: Path) -> Iterator[FakeCuda]:
    made = FakeCuda(tmp_path)
    yield made
    assert faults(made.log.operations) == []  # such as private pages that were pinned


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.slab.close()


def pinning(writer: Writer, memory: DeviceMemory) -> SharedMemoryOpener:
    return SharedMemoryOpener(writer.pass_slab, mode=MapMode.PINNED, pinner=Devices(memory))


def test_a_slab_is_pinned_once_whatever_comes_in_it_and_cannot_be_written_to(
    writer: Writer, cuda: FakeCuda
) -> None:
    opener = pinning(writer, cuda)
    for page in range(3):
        opened = opener.open(writer.lease(b"abc", page=page), until=NEVER)
        assert bytes(opened.buffer[:3]) == b"abc"
        assert opened.buffer.readonly

    (pinned,) = done(cuda.log.operations, "pin")
    assert pinned.size_bytes == CONTROL_BYTES + 16 * PAGE


def test_is_unpinned_with_the_last_view_of_it_and_before_it_is_unmapped(
    writer: Writer, cuda: FakeCuda
) -> None:
    opener = pinning(writer, cuda)
    opened = opener.open(writer.lease(b"abc"), until=NEVER)
    view = opened.buffer
    opened.vacate()
    opener.close()
    del opened
    gc.collect()
    assert done(cuda.log.operations, "unpin") == []
    assert bytes(view[:3]) == b"abc"

    del view

    (unpinned,) = done(cuda.log.operations, "unpin")
    assert unpinned.address == done(cuda.log.operations, "pin")[0].address


def test_what_the_driver_does_not_pin_is_an_error_that_keeps_nothing(
    writer: Writer, cuda: FakeCuda
) -> None:
    lease = writer.lease(b"abc")
    gc.collect()
    before = open_descriptors()
    with pytest.raises(DeviceError, match="801"):
        pinning(writer, FaultyMemory(cuda, (Fault(call="pin", error=801),))).open(
            lease, until=NEVER
        )

    gc.collect()
    assert not left_behind(before, open_descriptors)
    assert done(cuda.log.operations, "unpin") == []


def test_a_driver_that_hangs_at_it_costs_the_deadline_and_keeps_nothing(
    writer: Writer, cuda: FakeCuda, tmp_path: Path
) -> None:
    """The map is there until the driver lets go of it, and is unpinned then."""
    shut = gate(tmp_path / "gate")
    lease = writer.lease(b"abc")
    gc.collect()
    before = open_descriptors()
    opener = pinning(writer, FaultyMemory(cuda, (Fault(call="pin", hang=shut, times=1),)))
    with pytest.raises(DeadlinePassedError, match="the pinning of slab"):
        opener.open(lease, until=0.0)
    assert not opener.has(lease.extent.slab_id if lease.extent else "")

    let_go(shut)

    await_true(lambda: len(done(cuda.log.operations, "unpin")) == 1)
    await_true(lambda: not left_behind(before, open_descriptors))
    assert bytes(opener.open(lease, until=NEVER).buffer[:3]) == b"abc"


def test_a_twin_is_never_pinned(tmp_path: Path, cuda: FakeCuda) -> None:
    """That would fill its holes."""
    with child(Spec(folder=str(tmp_path))) as process:
        writer = DeviceWriter(process)
        opener = SharedMemoryOpener(writer.pass_slab, mode=MapMode.PINNED, pinner=Devices(cuda))
        opener.open(writer.lease(on_device=False), until=NEVER).vacate()
        writer.close()

    assert done(cuda.log.operations, "pin") == []


def test_copies_that_a_device_was_given_are_waited_for(
    writer: Writer, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used(memory: DeviceMemory) -> Device:
        return memory.devices()[0]

    monkeypatch.setattr(mapped_payload, "torch_device", used)
    opened = pinning(writer, cuda).open(writer.lease(b"abc"), until=NEVER)
    seen: list[bytes] = []
    cuda.enqueue(lambda: seen.append(bytes(opened.buffer[:3])), device=cuda.devices()[0])
    opened.finish(outlived=False)
    assert seen == []

    opened.vacate()

    assert seen == [b"abc"]


@pytest.mark.parametrize("ends", ["dropped", "outlived"])
def test_copies_of_who_never_said_which_device_are_waited_for_on_every_one(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The thread that gives leases back has another current device than the owner had."""
    memory = FakeCuda(tmp_path, devices=(ONE_GPU, OTHER_GPU))
    monkeypatch.setattr(mapped_payload, "torch_device", lambda memory: memory.devices()[0])
    monkeypatch.setattr(mapped_payload, "torch_devices", lambda memory: memory.devices())
    opened = pinning(writer, memory).open(writer.lease(b"abc"), until=NEVER)
    seen: list[bytes] = []
    memory.enqueue(lambda: seen.append(bytes(opened.buffer[:3])), device=memory.devices()[1])
    if ends == "outlived":
        opened.finish(outlived=True)

    opened.vacate()

    assert seen == [b"abc"]


def test_no_device_is_touched_for_a_process_that_gives_it_no_work(
    writer: Writer, cuda: FakeCuda
) -> None:
    opened = pinning(writer, cuda).open(writer.lease(b"abc"), until=NEVER)
    opened.finish(outlived=False)
    opened.vacate()

    assert {each.call for each in cuda.log.operations} == {"pin"}


def test_without_a_driver_the_mode_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "find_driver", lambda: None)

    with pytest.raises(ConfigError, match="'cow' or 'read_only'"):
        Devices().check_can_pin(timeout=30.0)


def test_a_driver_that_does_not_start_costs_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    monkeypatch.setattr(devices, "find_driver", started.wait)

    with pytest.raises(DeadlinePassedError, match="its start"):
        Devices().check_can_pin(timeout=0.0)
    started.set()
