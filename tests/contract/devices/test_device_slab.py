"""Device slabs: a device part and a host twin at the same offsets, and when their memory goes."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.log import done, faults, read_log
from tests.held import left_behind, open_descriptors

from teacher_logits import host_memory
from teacher_logits.device_memory import DeviceError, MemoryKind
from teacher_logits.devices.left_over import left_over_count, open_lock
from teacher_logits.devices.ranges import check_device_column
from teacher_logits.devices.slab import DeviceSlab
from teacher_logits.errors import PoolFullError, SlabOpenError
from teacher_logits.layout import Column, ColumnKind, ElementType
from teacher_logits.payload import Extent
from teacher_logits.tensors import column_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.device_memory import Device

LONG = 30.0
PAGE = 4096
SIZE = 64 * PAGE
EXTENT = Extent(slab_id="slab", offset_bytes=PAGE, size_bytes=2 * PAGE, slot=3, generation=2)
IDS = Column(
    kind=ColumnKind.TOPK_IDS, element_type=ElementType.INT32, shape=(16, 8), offset_bytes=256
)
ROWS = Column(
    kind=ColumnKind.ROW_STATUS, element_type=ElementType.UINT8, shape=(4,), offset_bytes=1024
)


ENDING = f"""
import sys
from pathlib import Path
from tests.fake_cuda.driver import FakeCuda
from teacher_logits.devices import left_over
from teacher_logits.devices.slab import DeviceSlab

left_over.EXIT_SECONDS = {LONG}
cuda = FakeCuda(Path(sys.argv[1]))
slab = DeviceSlab("slab", {PAGE}, memory=cuda, device=cuda.devices()[0])
print(slab.fd, flush=True)
sys.stdin.read()
slab.close()
print("closed", flush=True)
"""
"""A program that closes a slab of its own, once it is told to, and ends."""


@pytest.fixture
def cuda(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


def made(cuda: FakeCuda, size: int = SIZE, **more: Any) -> DeviceSlab:
    return DeviceSlab("slab", size, memory=cuda, device=cuda.devices()[0], **more)


@pytest.fixture
def slab(cuda: FakeCuda) -> Iterator[DeviceSlab]:
    slab = made(cuda)
    yield slab
    slab.close()


class TestTheTwin:
    def test_has_the_room_and_takes_none_of_it(self, slab: DeviceSlab) -> None:
        taken = os.fstat(slab.fd).st_blocks * 512

        assert slab.size_bytes == SIZE
        assert os.fstat(slab.fd).st_size == slab.total_bytes
        assert taken == slab.total_bytes - SIZE

    def test_has_the_slots(self, slab: DeviceSlab) -> None:
        slab.mark(3, 2)

        assert slab.generation(3) == 2

    def test_takes_what_is_written_into_it(self, slab: DeviceSlab) -> None:
        before = os.fstat(slab.fd).st_blocks
        slab.room(EXTENT)[ROWS.offset_bytes : ROWS.end_bytes] = b"abcd"

        assert (os.fstat(slab.fd).st_blocks - before) * 512 == PAGE

    def test_is_larger_than_registered_memory(self, cuda: FakeCuda) -> None:
        device = cuda.devices()[0]
        address = cuda.allocate(PAGE + 10, device=device)
        slab = made(cuda, PAGE + 10, address=address, row_bytes=100)

        assert slab.device_bytes == PAGE + 10
        assert slab.size_bytes == 3 * PAGE
        slab.close()


class TestTheDevicePart:
    def test_is_exported_as_it_lies_in_its_allocation(self, cuda: FakeCuda) -> None:
        address = cuda.allocate(4 * PAGE, device=cuda.devices()[0])
        slab = made(cuda, PAGE, address=address + 2 * PAGE)

        assert slab.exported.base_offset_bytes == 2 * PAGE
        assert slab.exported.allocation_bytes == 4 * PAGE
        assert slab.exported.device_uuid == cuda.devices()[0].uuid
        slab.close()

    def test_holds_a_column_at_the_offset_of_its_extent(self, slab: DeviceSlab) -> None:
        tensor = column_tensor(slab.device_view(EXTENT, IDS), IDS)
        tensor.copy_(torch.arange(128).view(16, 8))

        at = slab.address + EXTENT.offset_bytes + IDS.offset_bytes
        assert ctypes.string_at(at, 8) == b"\0\0\0\0\1\0\0\0"

    def test_can_be_copied_to_the_host(self, slab: DeviceSlab) -> None:
        column_tensor(slab.device_view(EXTENT, IDS), IDS).fill_(3)

        assert slab.read_device(EXTENT, IDS) == b"\3\0\0\0" * 128

    def test_that_the_driver_does_not_export_leaves_nothing(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(address: int) -> None:
            raise DeviceError("no", number=1, name="INVALID_VALUE", call="export")

        monkeypatch.setattr(cuda, "export", refuse)
        descriptors = open_descriptors()

        with pytest.raises(DeviceError, match="no"):
            made(cuda)

        assert len(done(cuda.log.operations, "free")) == 1
        assert not left_behind(descriptors, open_descriptors)

    @pytest.mark.parametrize("kind", [MemoryKind.POOL, MemoryKind.VIRTUAL, MemoryKind.MANAGED])
    def test_cannot_be_memory_without_a_handle(self, cuda: FakeCuda, kind: MemoryKind) -> None:
        address = cuda.allocate(SIZE, device=cuda.devices()[0], kind=kind)

        with pytest.raises(DeviceError):
            made(cuda, address=address)


class TestColumns:
    @given(
        extent=st.tuples(st.integers(-1, 2**64), st.integers(-1, 2**64)),
        column=st.tuples(st.integers(-1, 2**64), st.integers(-1, 2**40)),
        device=st.sampled_from([1, SIZE, 2**40, 2**63 - 1]),
    )
    def test_lie_in_their_extent_and_on_the_device(
        self, extent: tuple[int, int], column: tuple[int, int], device: int
    ) -> None:
        there = dataclasses.replace(EXTENT, offset_bytes=extent[0], size_bytes=extent[1])
        wanted = dataclasses.replace(IDS, offset_bytes=column[0], shape=(column[1], 1))
        end = column[0] + 4 * column[1]
        is_inside = (
            min(*extent, *column) >= 0 and end <= extent[1] and extent[0] + end <= device < 2**63
        )
        if is_inside:
            assert check_device_column(there, wanted, device_bytes=device) == end
        else:
            with pytest.raises(SlabOpenError, match=f"{device} bytes"):
                check_device_column(there, wanted, device_bytes=device)

    def test_over_rows_are_not_on_the_device(self, slab: DeviceSlab) -> None:
        with pytest.raises(SlabOpenError, match="row_status"):
            slab.device_view(EXTENT, ROWS)

    def test_may_have_an_extent_that_ends_behind_the_device(self, cuda: FakeCuda) -> None:
        address = cuda.allocate(PAGE, device=cuda.devices()[0])
        slab = made(cuda, PAGE, address=address, row_bytes=PAGE)
        extent = dataclasses.replace(EXTENT, offset_bytes=0)

        assert slab.device_view(extent, IDS).size_bytes == IDS.end_bytes
        beyond = dataclasses.replace(IDS, offset_bytes=PAGE)
        with pytest.raises(SlabOpenError, match=str(PAGE)):
            slab.device_view(extent, beyond)
        slab.close()


class TestHostCopies:
    def test_lie_at_the_same_offsets(self, slab: DeviceSlab) -> None:
        column_tensor(slab.device_view(EXTENT, IDS), IDS).fill_(9)
        slab.room(EXTENT)[ROWS.offset_bytes : ROWS.end_bytes] = b"abcd"

        slab.copy_to_twin(EXTENT, [IDS, ROWS])

        room = slab.room(EXTENT)
        assert bytes(room[IDS.offset_bytes : IDS.end_bytes]) == b"\x09\0\0\0" * 128
        assert bytes(room[ROWS.offset_bytes : ROWS.end_bytes]) == b"abcd"

    def test_ask_for_memory_before_they_take_it_and_only_once(
        self, slab: DeviceSlab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []
        monkeypatch.setattr(
            host_memory, "check_memory", lambda need, *, way_out: asked.append(need)
        )

        slab.copy_to_twin(EXTENT, [IDS])
        slab.copy_to_twin(EXTENT, [IDS])

        assert asked == [IDS.size_bytes]

    def test_are_not_made_where_there_is_no_memory(
        self, slab: DeviceSlab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(need: int, *, way_out: str) -> None:
            raise PoolFullError(f"{need}: {way_out}")

        monkeypatch.setattr(host_memory, "check_memory", refuse)
        before = os.fstat(slab.fd).st_blocks

        with pytest.raises(PoolFullError, match="cuda_ipc"):
            slab.copy_to_twin(EXTENT, [IDS])

        assert os.fstat(slab.fd).st_blocks == before

    def test_of_a_column_elsewhere_are_refused_before_any_is_made(self, slab: DeviceSlab) -> None:
        beyond = dataclasses.replace(IDS, kind=ColumnKind.TOPK_LOGITS, offset_bytes=2 * PAGE)

        with pytest.raises(SlabOpenError):
            slab.copy_to_twin(EXTENT, [IDS, beyond])

        assert not any(slab.room(EXTENT)[:PAGE])


class TestClosing:
    def test_gives_the_memory_back(self, cuda: FakeCuda, slab: DeviceSlab) -> None:
        slab.close()
        slab.close()

        assert slab.fd == -1
        assert len(done(cuda.log.operations, "free")) == 1

    def test_waits_for_the_last_view_and_says_when_the_memory_is_free(self, cuda: FakeCuda) -> None:
        freed: SimpleQueue[None] = SimpleQueue()
        slab = made(cuda, when_freed=lambda: freed.put(None))
        tensor = column_tensor(slab.device_view(EXTENT, IDS), IDS)
        slab.close()
        assert not done(cuda.log.operations, "free")

        tensor.fill_(1)
        del tensor
        gc.collect()

        freed.get(timeout=LONG)
        assert len(done(cuda.log.operations, "free")) == 1

    def test_waits_for_the_readers_and_says_when_the_memory_is_free(self, cuda: FakeCuda) -> None:
        freed: SimpleQueue[None] = SimpleQueue()
        slab = made(cuda, when_freed=lambda: freed.put(None))
        readers = [open_lock(slab.fd) for _ in range(2)]
        for reader in readers:
            fcntl.flock(reader, fcntl.LOCK_SH)
        slab.close()
        os.close(readers[0])
        assert left_over_count() == 1
        assert not done(cuda.log.operations, "free")

        os.close(readers[1])

        freed.get(timeout=LONG)
        assert left_over_count() == 0
        assert len(done(cuda.log.operations, "free")) == 1
        assert not faults(cuda.log.operations)

    def test_says_at_once_that_the_memory_is_free_where_nobody_had_it(self, cuda: FakeCuda) -> None:
        freed: SimpleQueue[None] = SimpleQueue()
        made(cuda, when_freed=lambda: freed.put(None)).close()

        freed.get_nowait()

    def test_is_not_said_to_be_free_where_the_driver_keeps_it(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(address: int, *, device: Device) -> None:
            raise DeviceError("no", number=999, name="UNKNOWN", call="free")

        freed: SimpleQueue[None] = SimpleQueue()
        slab = made(cuda, when_freed=lambda: freed.put(None))
        monkeypatch.setattr(cuda, "free", refuse)

        slab.close()

        assert freed.empty()

    def test_leaves_alone_what_somebody_may_yet_open(
        self, cuda: FakeCuda, slab: DeviceSlab
    ) -> None:
        slab.close(in_use=True)

        assert left_over_count() == 0
        assert not done(cuda.log.operations, "free")

    def test_in_a_fork_is_none_of_its_business(self, slab: DeviceSlab) -> None:
        reader = open_lock(slab.fd)
        fcntl.flock(reader, fcntl.LOCK_SH)
        slab.close()
        child_pid = os.fork()
        if not child_pid:
            os._exit(left_over_count())

        assert os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]) == 0
        assert left_over_count() == 1
        os.close(reader)

    def test_leaves_registered_memory_to_its_owner_and_says_when_it_is_read(
        self, cuda: FakeCuda
    ) -> None:
        slab = made(cuda, PAGE, address=cuda.allocate(PAGE, device=cuda.devices()[0]))
        reader = open_lock(slab.fd)
        fcntl.flock(reader, fcntl.LOCK_SH)

        slab.close()

        assert slab.is_open_elsewhere()
        os.close(reader)
        assert not slab.is_open_elsewhere()
        assert not done(cuda.log.operations, "free")

    def test_is_finished_at_the_end_of_the_program_where_its_readers_let_go(
        self, tmp_path: Path
    ) -> None:
        """The driver would free the memory under them."""
        with subprocess.Popen(
            [sys.executable, "-c", ENDING, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        ) as ending:
            assert ending.stdin is not None
            assert ending.stdout is not None
            fd = int(ending.stdout.readline())
            reader = os.open(f"/proc/{ending.pid}/fd/{fd}", os.O_RDONLY)
            fcntl.flock(reader, fcntl.LOCK_SH)
            ending.stdin.close()
            assert ending.stdout.readline() == "closed\n"
            os.close(reader)
            assert ending.wait(LONG) == 0

        assert len(done(read_log(tmp_path), "free")) == 1

    @pytest.mark.parametrize("who", ["a reader", "a view", "nobody"])
    def test_keeps_the_owner_of_registered_memory_alive_as_long(
        self, cuda: FakeCuda, who: str
    ) -> None:
        """To free it under a reader is undefined, and its address would be used for another."""
        address = cuda.allocate(SIZE, device=cuda.devices()[0])
        tensor = torch.empty(1)
        slab = made(cuda, address=address, owner=tensor)
        reader = open_lock(slab.fd)
        if who == "a reader":
            fcntl.flock(reader, fcntl.LOCK_SH)
        view = slab.device_view(EXTENT, IDS) if who == "a view" else None
        gone = threading.Event()
        weakref.finalize(tensor, gone.set)
        del tensor

        assert not gone.is_set()
        slab.close()
        assert gone.is_set() == (who == "nobody")
        del view
        os.close(reader)
        assert gone.wait(LONG)

    def test_keeps_the_owner_of_what_somebody_may_yet_open(self, cuda: FakeCuda) -> None:
        tensor = torch.empty(1)
        alive = weakref.ref(tensor)
        address = cuda.allocate(SIZE, device=cuda.devices()[0])
        made(cuda, address=address, owner=tensor).close(in_use=True)
        del tensor
        gc.collect()

        assert alive() is not None

    def test_ends_the_views(self, slab: DeviceSlab) -> None:
        """The memory is somebody else's by then."""
        slab.close()

        for use in (slab.device_view, slab.read_device):
            with pytest.raises(SlabOpenError, match="was closed"):
                use(EXTENT, IDS)
        with pytest.raises(SlabOpenError, match="was closed"):
            slab.copy_to_twin(EXTENT, [IDS])

    @pytest.mark.parametrize("use", ["read_device", "copy_to_twin"])
    def test_amid_a_copy_waits_for_it(
        self, cuda: FakeCuda, slab: DeviceSlab, monkeypatch: pytest.MonkeyPatch, use: str
    ) -> None:
        copy_to_host = cuda.copy_to_host

        def closed_meanwhile(target: memoryview, address: int, *, device: Device) -> None:
            slab.close()
            copy_to_host(target, address, device=device)

        monkeypatch.setattr(cuda, "copy_to_host", closed_meanwhile)
        getattr(slab, use)(EXTENT, IDS if use == "read_device" else [IDS])

        left_alone = [each.call for each in cuda.log.operations]
        assert "free" not in left_alone[: left_alone.index("copy_to_host")]

    def test_gives_all_descriptors_back(self, cuda: FakeCuda) -> None:
        before = open_descriptors()
        slab = made(cuda)
        slab.close()
        del slab
        gc.collect()

        assert not left_behind(before, open_descriptors)
