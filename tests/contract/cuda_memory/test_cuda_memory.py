"""Device memory over the driver's calls: contexts, kinds of memory, opens, errors, forks."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from tests.contract.cuda_memory.cuda_stand_in import DEVICE, FOREIGN, HOST, StandIn

from teacher_logits import cuda_memory
from teacher_logits.cuda_memory import CudaMemory, find_driver
from teacher_logits.cuda_memory import by_bindings as cuda_bindings
from teacher_logits.cuda_memory import by_ctypes as cuda_ctypes
from teacher_logits.device_memory import Device, DeviceError, DeviceMemory, MemoryKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.cuda_memory.calls import DriverCalls

PAGE = 4096
PATIENCE_SECONDS = 30


@pytest.fixture
def calls() -> StandIn:
    return StandIn("NVIDIA X", "NVIDIA X MIG 1g.10gb")


@pytest.fixture
def memory(calls: StandIn) -> CudaMemory:
    return CudaMemory(calls)


@pytest.fixture
def device(memory: CudaMemory) -> Device:
    return memory.devices()[0]


def test_is_device_memory(memory: CudaMemory) -> None:
    taken: DeviceMemory = memory

    assert taken.view_device(taken.devices()[1]) == (2, 1)


class TestDevices:
    def test_are_known_as_the_drivers_tools_print_them(self, memory: CudaMemory) -> None:
        whole, part = memory.devices()

        assert whole == Device(
            ordinal=0, uuid="GPU-0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", name="NVIDIA X"
        )
        assert part.uuid == "MIG-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"
        assert part.is_mig

    def test_are_looked_up_without_a_context(self, calls: StandIn, memory: CudaMemory) -> None:
        assert memory.devices()
        assert not calls.retained

    def test_of_another_process_are_refused(self, memory: CudaMemory) -> None:
        stranger = Device(ordinal=0, uuid="GPU-of-elsewhere", name="NVIDIA X")

        with pytest.raises(DeviceError, match="GPU-of-elsewhere") as caught:
            memory.allocate(PAGE, device=stranger)

        assert caught.value.number == 101


class TestContexts:
    @pytest.mark.parametrize(
        "use",
        [
            lambda memory, device: memory.allocate(PAGE, device=device),
            lambda memory, device: memory.free(1, device=device),
            lambda memory, device: memory.open(FOREIGN, device=device),
            lambda memory, device: memory.record(device=device).wait(),
            lambda memory, device: memory.record(device=device).is_past(),
            lambda memory, device: memory.synchronise(device=device),
            lambda memory, device: memory.pin(PAGE, PAGE),
            lambda memory, device: memory.unpin(PAGE),
        ],
    )
    def test_are_pushed_and_popped_around_each_call(
        self,
        calls: StandIn,
        memory: CudaMemory,
        device: Device,
        use: Callable[[CudaMemory, Device], object],
    ) -> None:
        calls.stack.append(4711)  # what the caller has made current

        use(memory, device)

        assert calls.stack == [4711]
        assert calls.log.count("cuCtxPushCurrent") == calls.log.count("cuCtxPopCurrent") > 0

    def test_are_popped_after_a_call_that_is_refused(
        self, calls: StandIn, memory: CudaMemory, device: Device
    ) -> None:
        calls.errors["cuMemAlloc"] = 2

        with pytest.raises(DeviceError):
            memory.allocate(PAGE, device=device)

        assert calls.stack == []

    def test_are_made_once_a_device(self, calls: StandIn, memory: CudaMemory) -> None:
        for device in (*memory.devices(), *memory.devices()):
            memory.synchronise(device=device)

        assert calls.retained == {10: 1, 11: 1}

    def test_are_each_threads_own(self, calls: StandIn, memory: CudaMemory, device: Device) -> None:
        def use() -> None:
            for _ in range(50):
                memory.free(memory.allocate(PAGE, device=device), device=device)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert calls.log.count("cuMemFree") == 200

    def test_are_not_made_to_say_what_lies_at_an_address(
        self, calls: StandIn, memory: CudaMemory
    ) -> None:
        memory.locate(4711)

        assert not calls.retained

    def test_that_are_there_already_are_used_for_what_concerns_no_device(
        self, calls: StandIn, memory: CudaMemory
    ) -> None:
        memory.synchronise(device=memory.devices()[1])

        memory.pin(PAGE, PAGE)

        assert calls.retained == {11: 1}


class TestAnAddress:
    @pytest.mark.parametrize(
        ("kind", "found"),
        [
            (MemoryKind.PLAIN, [DEVICE, 0, 1, 1, PAGE, PAGE, 0]),
            (MemoryKind.POOL, [DEVICE, 0, 1, 0, PAGE, PAGE, 0xABC]),
            (MemoryKind.POOL, [DEVICE, 0, 1, 1, PAGE, PAGE, 0xABC]),
            (MemoryKind.VIRTUAL, [DEVICE, 0, 1, 0, PAGE, PAGE, 0]),
            (MemoryKind.MANAGED, [DEVICE, 1, 1, 0, PAGE, PAGE, 0]),
            (MemoryKind.MANAGED, [HOST, 1, 1, 0, PAGE, PAGE, 0]),
            (MemoryKind.HOST, [HOST, 0, 1, 0, PAGE, PAGE, 0]),
            (MemoryKind.UNKNOWN, [0, 0, -2, 0, 0, 0, 0]),
        ],
    )
    def test_is_of_the_kind_that_the_driver_says(
        self, calls: StandIn, memory: CudaMemory, kind: MemoryKind, found: list[int]
    ) -> None:
        calls.attributes[PAGE] = found

        where = memory.locate(PAGE)

        assert where.kind is kind
        is_on_device = kind not in (MemoryKind.HOST, MemoryKind.UNKNOWN)
        assert where.device == (memory.devices()[1] if is_on_device else None)
        assert (where.base, where.allocation_bytes) == (found[4], found[5])

    def test_without_a_range_among_its_attributes_is_asked_for_its_range(
        self, calls: StandIn, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls.attributes[PAGE] = [DEVICE, 0, 0, 1, 0, 0, 0]
        monkeypatch.setattr(calls, "cuMemGetAddressRange", lambda address: (0, PAGE, 77))

        where = memory.locate(PAGE)

        assert (where.base, where.allocation_bytes) == (PAGE, 77)

    @pytest.mark.parametrize("number", [1, 201])
    def test_that_the_driver_has_never_seen_is_unknown(
        self, calls: StandIn, memory: CudaMemory, number: int
    ) -> None:
        calls.errors["cuPointerGetAttributes"] = number

        assert memory.locate(PAGE).kind is MemoryKind.UNKNOWN


class TestAllocating:
    @pytest.mark.parametrize(
        ("size", "given"), [(32, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20)]
    )
    def test_takes_whole_blocks_so_that_a_handle_shows_nothing_else(
        self, calls: StandIn, memory: CudaMemory, device: Device, size: int, given: int
    ) -> None:
        exported = memory.export(memory.allocate(size, device=device))

        assert ("cuMemAlloc", (given,)) in calls.given
        assert exported.allocation_bytes == given


class TestExporting:
    def test_names_the_allocation_and_the_place_in_it(
        self, calls: StandIn, memory: CudaMemory
    ) -> None:
        address = calls.memory(PAGE, device=1)

        exported = memory.export(address + 256)

        assert exported.base_offset_bytes == 256
        assert exported.allocation_bytes == PAGE
        assert exported.device_uuid == memory.devices()[1].uuid
        assert exported.handle == bytes([3]) * 64

    def test_of_no_device_memory_is_refused(self, memory: CudaMemory) -> None:
        with pytest.raises(DeviceError, match="cuIpcGetMemHandle") as caught:
            memory.export(4711)

        assert caught.value.number == 1


class TestOpening:
    def test_twice_opens_once(self, calls: StandIn, memory: CudaMemory, device: Device) -> None:
        assert memory.open(FOREIGN, device=device) == memory.open(FOREIGN, device=device)
        assert calls.log.count("cuIpcOpenMemHandle") == 1

    def test_is_undone_by_the_last_close(
        self, calls: StandIn, memory: CudaMemory, device: Device
    ) -> None:
        address = memory.open(FOREIGN, device=device)
        memory.open(FOREIGN, device=device)

        memory.close(address, device=device)
        assert calls.open_count[0] == 1
        memory.close(address, device=device)
        assert calls.open_count[0] == 0

        with pytest.raises(DeviceError) as caught:
            memory.close(address, device=device)
        assert caught.value.number == 1

    def test_again_after_the_last_close_opens_anew(
        self, calls: StandIn, memory: CudaMemory, device: Device
    ) -> None:
        memory.close(memory.open(FOREIGN, device=device), device=device)

        memory.open(FOREIGN, device=device)

        assert calls.open_count[0] == 1

    def test_is_counted_a_device(self, calls: StandIn, memory: CudaMemory) -> None:
        one, other = memory.devices()

        assert memory.open(FOREIGN, device=one) != memory.open(FOREIGN, device=other)
        assert calls.open_count == {0: 1, 1: 1}

    def test_by_two_threads_at_once_is_closed_as_often(
        self, calls: StandIn, memory: CudaMemory, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        both = threading.Barrier(2)
        real = calls.cuIpcOpenMemHandle

        def meet(handle: bytes, flags: int) -> tuple[int, int]:
            both.wait()
            return real(handle, flags)

        monkeypatch.setattr(calls, "cuIpcOpenMemHandle", meet)
        opened: list[int] = []
        threads = [
            threading.Thread(target=lambda: opened.append(memory.open(FOREIGN, device=device)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert calls.open_count[0] == 2

        for address in opened:
            memory.close(address, device=device)

        assert calls.open_count[0] == 0

    def test_finds_what_a_finaliser_closes_meanwhile(
        self, calls: StandIn, memory: CudaMemory, device: Device
    ) -> None:
        """The collector runs anywhere, and what it finds may close the very handle."""
        address = memory.open(FOREIGN, device=device)

        class Cleared(bytes):
            def __eq__(self, other: object) -> bool:
                memory.close(address, device=device)
                return bytes(self) == other

            __hash__ = bytes.__hash__

        opening = threading.Thread(
            target=lambda: memory.open(Cleared(FOREIGN), device=device), daemon=True
        )
        opening.start()
        opening.join(PATIENCE_SECONDS)

        assert not opening.is_alive()
        assert calls.log.count("cuIpcOpenMemHandle") == 2
        assert calls.open_count[0] == 1

    def test_asks_for_peer_access(self, calls: StandIn, memory: CudaMemory, device: Device) -> None:
        memory.open(FOREIGN, device=device)

        assert ("cuIpcOpenMemHandle", (FOREIGN, 1)) in calls.given

    @pytest.mark.parametrize("number", [1, 101, 201, 217, 801, 999])
    def test_that_is_refused_says_the_drivers_number_and_name(
        self, calls: StandIn, memory: CudaMemory, device: Device, number: int
    ) -> None:
        calls.errors["cuIpcOpenMemHandle"] = number

        with pytest.raises(DeviceError, match=str(number)) as caught:
            memory.open(FOREIGN, device=device)

        assert caught.value.facts == {
            "number": number,
            "name": f"CUDA_ERROR_{number}",
            "call": "cuIpcOpenMemHandle",
        }
        assert calls.stack == []


class TestCopies:
    def test_go_both_ways(self, memory: CudaMemory, device: Device) -> None:
        address = memory.allocate(PAGE, device=device)
        memory.copy_to_device(address + 8, memoryview(b"abcd"), device=device)

        seen = bytearray(6)
        memory.copy_to_host(memoryview(seen), address + 7, device=device)

        assert seen == b"\0abcd\0"

    def test_to_the_device_are_there_when_the_call_returns(
        self, calls: StandIn, memory: CudaMemory, device: Device
    ) -> None:
        memory.copy_to_device(
            memory.allocate(PAGE, device=device), memoryview(b"abcd"), device=device
        )

        copied = calls.log.index("cuMemcpyHtoD")
        assert calls.log[copied : copied + 2] == ["cuMemcpyHtoD", "cuStreamSynchronize"]

    def test_into_memory_of_more_than_bytes_fill_it(
        self, memory: CudaMemory, device: Device
    ) -> None:
        address = memory.allocate(PAGE, device=device)
        memory.copy_to_device(address, memoryview(b"\1\0\0\0\2\0\0\0"), device=device)

        seen = memoryview(bytearray(8)).cast("i")
        memory.copy_to_host(seen, address, device=device)

        assert seen.tolist() == [1, 2]

    def test_of_nothing_ask_nothing(
        self, calls: StandIn, memory: CudaMemory, device: Device
    ) -> None:
        memory.copy_to_host(memoryview(bytearray()), 1, device=device)
        memory.copy_to_device(1, memoryview(b""), device=device)

        assert not calls.retained


class TestEvents:
    def test_are_of_the_default_stream_where_torch_has_none(
        self, calls: StandIn, memory: CudaMemory, device: Device
    ) -> None:
        event = memory.record(device=device)

        name, given = calls.given[-2]
        assert name == "cuEventRecord"
        assert given[1] == 0
        del event

    def test_are_of_the_callers_current_stream(
        self, calls: StandIn, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Stream:
            cuda_stream = 0xABC

        asked: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

        def current_stream(ordinal: int) -> Stream:
            asked.append(ordinal)
            return Stream()

        monkeypatch.setattr(torch.cuda, "current_stream", current_stream)

        memory.record(device=memory.devices()[1])

        assert asked == [1]
        assert any(given[1:] == (0xABC,) for name, given in calls.given if name == "cuEventRecord")

    def test_measure_no_time(self, calls: StandIn, memory: CudaMemory, device: Device) -> None:
        memory.record(device=device)

        assert ("cuEventCreate", (2,)) in calls.given

    @pytest.mark.parametrize(("result", "is_past"), [(0, True), (600, False)])
    def test_are_past_or_not(
        self, calls: StandIn, memory: CudaMemory, device: Device, result: int, is_past: bool
    ) -> None:
        calls.event_result = result

        assert memory.record(device=device).is_past() is is_past

    def test_show_what_went_wrong_before_them(
        self, calls: StandIn, memory: CudaMemory, device: Device
    ) -> None:
        event = memory.record(device=device)
        calls.errors["cuEventSynchronize"] = calls.event_result = 700

        with pytest.raises(DeviceError, match="700"):
            event.wait()
        with pytest.raises(DeviceError, match="700"):
            event.is_past()

    def test_are_destroyed_with_their_objects(
        self, calls: StandIn, memory: CudaMemory, device: Device
    ) -> None:
        event = memory.record(device=device)
        assert "cuEventDestroy" not in calls.log

        del event
        gc.collect()

        assert calls.log.count("cuEventDestroy") == 1


class TestPinning:
    @pytest.mark.parametrize(("has_it", "flags"), [(1, 9), (0, 1)])
    def test_is_for_all_devices_and_of_read_only_pages_where_they_can(
        self, calls: StandIn, memory: CudaMemory, has_it: int, flags: int
    ) -> None:
        calls.has_read_only = has_it

        memory.pin(PAGE, 2 * PAGE)

        assert ("cuMemHostRegister", (PAGE, 2 * PAGE, flags)) in calls.given


class TestAFork:
    def test_is_refused_and_told_to_be_spawned(
        self,
        calls: StandIn,
        memory: CudaMemory,
        device: Device,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        address = memory.open(FOREIGN, device=device)
        asked = len(calls.log)
        child = os.getpid() + 1
        monkeypatch.setattr(os, "getpid", lambda: child)

        for use in (
            lambda: memory.open(FOREIGN, device=device),
            lambda: memory.close(address, device=device),
            lambda: memory.locate(address),
            lambda: memory.synchronise(device=device),
        ):
            with pytest.raises(DeviceError, match=f"{child}.*spawn") as caught:
                use()
            assert caught.value.number == 3
        assert len(calls.log) == asked

    def test_destroys_none_of_its_parents_events(
        self,
        calls: StandIn,
        memory: CudaMemory,
        device: Device,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        event = memory.record(device=device)
        child = os.getpid() + 1
        monkeypatch.setattr(os, "getpid", lambda: child)

        del event
        gc.collect()

        assert "cuEventDestroy" not in calls.log


class TestFindingADriver:
    @pytest.fixture(autouse=True)
    def anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_memory, "_found", {})

    def find(
        self, monkeypatch: pytest.MonkeyPatch, *found: DriverCalls | None
    ) -> CudaMemory | None:
        by_package, by_library = found
        monkeypatch.setattr(cuda_bindings, "load", lambda: by_package)
        monkeypatch.setattr(cuda_ctypes, "load", lambda: by_library)
        return find_driver()

    def test_takes_nvidias_package_where_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one, other = StandIn(), StandIn()
        one.source = "the package"

        driver = self.find(monkeypatch, one, other)

        assert driver is not None
        assert driver.source == "the package"
        assert not other.log

    def test_takes_the_library_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.find(monkeypatch, None, StandIn()) is not None

    def test_finds_none_where_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.find(monkeypatch, None, None) is None

    @pytest.mark.parametrize("number", [34, 100])
    def test_finds_none_where_there_is_no_device(
        self, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        calls = StandIn()
        calls.errors["cuInit"] = number

        assert self.find(monkeypatch, None, calls) is None

    def test_says_so_where_a_driver_does_not_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = StandIn()
        calls.errors["cuInit"] = 999

        with pytest.raises(DeviceError, match="999"):
            self.find(monkeypatch, None, calls)

    def test_starts_it_once_and_makes_no_context(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = StandIn()
        driver = self.find(monkeypatch, None, calls)

        assert find_driver() is driver
        assert calls.log.count("cuInit") == 1
        assert not calls.retained

    def test_refuses_a_fork_of_a_process_that_had_started_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.find(monkeypatch, None, StandIn())
        parent = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)

        with pytest.raises(DeviceError, match="spawn"):
            find_driver()
