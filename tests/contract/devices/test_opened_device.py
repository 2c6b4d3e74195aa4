"""A device slab as its reader has it: checked, opened once, and closed after the last view."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
from typing import TYPE_CHECKING

import pytest
from tests.fake_cuda.child import Child, child
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.faulty import Fault, FaultyMemory
from tests.fake_cuda.log import done, faults, read_log, still_open
from tests.fake_cuda.spec import Spec

from teacher_logits.device_memory import DeviceError, ExportedMemory
from teacher_logits.devices.left_over import is_locked, open_lock
from teacher_logits.devices.opened import OpenedDevice
from teacher_logits.errors import SlabOpenError
from teacher_logits.layout import Column, ColumnKind, ElementType
from teacher_logits.payload import Extent
from teacher_logits.slab import WriterSlab
from teacher_logits.tensors import column_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from teacher_logits.device_memory import Device

PAGE = 4096
EXTENT = Extent(slab_id="slab", offset_bytes=PAGE, size_bytes=PAGE, slot=0, generation=2)
IDS = Column(kind=ColumnKind.TOPK_IDS, element_type=ElementType.INT32, shape=(2, 1), offset_bytes=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="module")
def writer(folder: Path) -> Iterator[Child]:
    with child(Spec(folder=str(folder))) as process:
        yield process


@pytest.fixture(scope="module")
def exported(writer: Child) -> ExportedMemory:
    """Two pages of a writer's, from the second page of its allocation on."""
    address = writer.number("allocate", 4 * PAGE)
    writer.ask("write", address + 2 * PAGE, b"\5\0\0\0\6\0\0\0", device=None)
    return writer.export(address + PAGE)


@pytest.fixture
def cuda(folder: Path) -> FakeCuda:
    return FakeCuda(folder)


@pytest.fixture
def twin() -> Iterator[WriterSlab]:
    twin = WriterSlab("slab", 2 * PAGE, is_sparse=True)
    yield twin
    twin.close()


def opened(
    cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory, size: int = 2 * PAGE
) -> OpenedDevice:
    return OpenedDevice(
        "slab", exported, size, twin_fd=twin.fd, memory=cuda, device=cuda.devices()[0]
    )


class TestOpening:
    def test_shows_what_the_writer_wrote(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        device = opened(cuda, twin, exported)

        assert column_tensor(device.view(EXTENT, IDS), IDS).flatten().tolist() == [5, 6]
        device.close()

    def test_locks_the_twin_until_it_is_closed(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        lock = open_lock(twin.fd)
        device = opened(cuda, twin, exported)
        assert is_locked(lock)

        device.close()

        assert not is_locked(lock)

    def test_is_refused_once_the_writer_has_retired_the_slab(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        fd = open_lock(twin.fd)
        twin.close()

        with pytest.raises(SlabOpenError, match="retired"):
            OpenedDevice("slab", exported, PAGE, twin_fd=fd, memory=cuda, device=cuda.devices()[0])

        assert not done(cuda.log.operations, "open")

    def test_that_the_driver_refuses_leaves_nothing(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        lock = open_lock(twin.fd)
        strange = dataclasses.replace(exported, handle=bytes(64))

        with pytest.raises(DeviceError):
            opened(cuda, twin, strange)

        assert not is_locked(lock)

    def test_that_fails_ends_the_lock_although_a_fork_was_made_meanwhile(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        """The driver is called on a thread, and another may fork."""
        lock = open_lock(twin.fd)
        reading, writing = os.pipe()
        children: list[int] = []

        def fork_and_fail(handle: bytes, *, device: Device) -> int:
            children.append(os.fork())
            if not children[0]:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
            return cuda.open(bytes(64), device=device)

        forking = FaultyMemory(cuda, ())
        forking.open = fork_and_fail  # type: ignore[method-assign]
        with pytest.raises(DeviceError):
            OpenedDevice(
                "slab", exported, PAGE, twin_fd=twin.fd, memory=forking, device=cuda.devices()[0]
            )

        try:
            assert not is_locked(lock)
        finally:
            os.close(writing)
            os.close(reading)
            os.waitpid(children[0], 0)

    def test_without_descriptors_names_their_limit(
        self,
        cuda: FakeCuda,
        twin: WriterSlab,
        exported: ExportedMemory,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def refuse(path: str, flags: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(SlabOpenError, match="ulimit -n"):
            opened(cuda, twin, exported)

    def test_believes_the_driver_and_not_the_writer(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        boasting = dataclasses.replace(exported, allocation_bytes=64 * PAGE)

        with pytest.raises(SlabOpenError) as caught:
            opened(cuda, twin, boasting, size=4 * PAGE)

        assert caught.value.facts["allocation_bytes"] == 4 * PAGE
        del caught
        gc.collect()
        assert len(done(cuda.log.operations, "close")) == 1


class TestClosing:
    def test_waits_for_the_last_view(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        device = opened(cuda, twin, exported)
        tensor = column_tensor(device.view(EXTENT, IDS), IDS)

        device.close()
        device.close()

        assert not done(cuda.log.operations, "close")
        assert tensor.flatten().tolist() == [5, 6]
        del tensor
        gc.collect()
        assert len(done(cuda.log.operations, "close")) == 1

    def test_waits_for_the_device(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        device = opened(cuda, twin, exported)
        did: list[str] = []
        cuda.enqueue(lambda: did.append("a late read"), device=cuda.devices()[0])

        device.close()

        assert did == ["a late read"]

    def test_that_the_driver_refuses_leaves_the_twin_locked(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        """It is open, then, and its writer must not free it."""
        lock = open_lock(twin.fd)
        broken = FaultyMemory(cuda, (Fault(call="close", error=999),))
        device = OpenedDevice(
            "slab", exported, PAGE, twin_fd=twin.fd, memory=broken, device=cuda.devices()[0]
        )

        device.close()

        assert is_locked(lock)
        (left,) = still_open(cuda.log.operations)
        cuda.close(done(cuda.log.operations, "open")[0].address, device=cuda.devices()[0])
        assert left[0] == os.getpid()

    def test_ends_the_lock_although_a_fork_lives(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        """A loader's workers have their parent's descriptors, and no share in its handles."""
        lock = open_lock(twin.fd)
        device = opened(cuda, twin, exported)
        reading, writing = os.pipe()
        child_pid = os.fork()
        if not child_pid:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)

        device.close()

        try:
            assert not is_locked(lock)
        finally:
            os.close(writing)
            os.close(reading)
            os.waitpid(child_pid, 0)

    def test_ends_the_views(
        self, cuda: FakeCuda, twin: WriterSlab, exported: ExportedMemory
    ) -> None:
        device = opened(cuda, twin, exported)
        device.close()

        with pytest.raises(SlabOpenError, match="closed"):
            device.view(EXTENT, IDS)

    def test_leaves_no_fault_and_as_many_closes_as_opens(self, folder: Path) -> None:
        gc.collect()
        log = read_log(folder)

        assert len(done(log, "open")) == len(done(log, "close"))
        assert not faults(log)
