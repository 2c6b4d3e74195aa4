"""Host memory is pinned where a device may read it, and a private mapping is a fault."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import pytest
from tests.fake_cuda.log import faults
from tests.fake_cuda.spec import Spec

from teacher_logits.device_memory import DeviceError, MemoryKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.fake_cuda.driver import FakeCuda

SIZE = 4 * mmap.PAGESIZE


@pytest.fixture
def fake(tmp_path: Path) -> FakeCuda:
    return Spec(folder=str(tmp_path)).fake()


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("pinned")
    os.truncate(fd, SIZE)
    yield fd
    os.close(fd)


def address_of(mapped: mmap.mmap) -> int:
    """Return where a writable mapping lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def test_a_shared_mapping_is_pinned_once_and_given_back(fake: FakeCuda, memfd: int) -> None:
    mapped = mmap.mmap(memfd, SIZE)
    address = address_of(mapped)
    fake.pin(address, SIZE)
    found = fake.locate(address + 5)
    assert (found.kind, found.base, found.allocation_bytes) == (MemoryKind.HOST, address, SIZE)
    with pytest.raises(DeviceError, match="712"):
        fake.pin(address + mmap.PAGESIZE, 1)
    fake.unpin(address)
    with pytest.raises(DeviceError, match="713"):
        fake.unpin(address)
    assert faults(fake.log.operations) == []


def test_to_pin_a_private_mapping_is_a_fault(fake: FakeCuda, memfd: int) -> None:
    mapped = mmap.mmap(memfd, SIZE, flags=mmap.MAP_PRIVATE)
    address = address_of(mapped)
    fake.pin(address, SIZE)
    (fault,) = faults(fake.log.operations)
    assert "private" in fault


def test_what_is_not_mapped_is_not_pinned(fake: FakeCuda) -> None:
    with pytest.raises(DeviceError, match="not all mapped"):
        fake.pin(mmap.PAGESIZE, mmap.PAGESIZE)
