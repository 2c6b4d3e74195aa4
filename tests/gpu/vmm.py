"""Virtual memory by descriptor: a measurement for a later transport, and nothing that we use yet.

A file descriptor is all that a reader of another PID namespace needs, and a mapping may be
read-only. What it costs, and whether this driver and device do it, is said by the stage
``vmm_by_descriptor``. Structures and numbers: CUDA driver API reference, "Virtual Memory
Management".

python -m tests.gpu.vmm ORDINAL FD SIZE SEED maps a descriptor and compares what is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

import torch
from tests.gpu.peer import fill, wrong_words
from tests.gpu.rig import MIB, ROOT, Failed, Numbers, Rig, Skipped

from teacher_logits.cuda_memory.by_ctypes import LIBRARY
from teacher_logits.devices.views import DLPACK_CUDA, DeviceView, device_tensor

_PINNED = 1
_POSIX_DESCRIPTOR = 1
_ON_DEVICE = 1
READ, READ_WRITE = 1, 3


class Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", c_int), ("id", c_int))


class Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", Location), ("flags", c_int))


class Driver:
    """The calls, on one device, in torch's context."""

    def __init__(self, ordinal: int) -> None:
        torch.zeros(1, device=f"cuda:{ordinal}")
        torch.cuda.synchronize(ordinal)
        self._library = ctypes.CDLL(LIBRARY)
        self._ordinal = ordinal
        self._location = Location(_ON_DEVICE, ordinal)

    def create(self, size_bytes: int) -> tuple[int, int]:
        """Make memory of at least a size; return its handle and size."""
        properties = Properties(
            type=_PINNED, handle_types=_POSIX_DESCRIPTOR, location=self._location
        )
        unit = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(unit), byref(properties), c_int(0))
        size = -(-size_bytes // unit.value) * unit.value
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0))
        return handle.value, size

    def export(self, handle: int) -> int:
        """Return a descriptor of memory."""
        fd = c_int(-1)
        self._call(
            "cuMemExportToShareableHandle",
            byref(fd),
            c_uint64(handle),
            c_int(_POSIX_DESCRIPTOR),
            c_uint64(0),
        )
        return fd.value

    def take(self, fd: int) -> int:
        """Return the handle of a descriptor's memory."""
        handle = c_uint64()
        self._call(
            "cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(_POSIX_DESCRIPTOR)
        )
        return handle.value

    def map(self, handle: int, size_bytes: int, access: int) -> int:
        """Return the address at which memory is mapped."""
        address = c_uint64()
        size = c_size_t(size_bytes)
        self._call(
            "cuMemAddressReserve", byref(address), size, c_size_t(0), c_uint64(0), c_uint64(0)
        )
        self._call("cuMemMap", address, size, c_size_t(0), c_uint64(handle), c_uint64(0))
        allowed = Access(self._location, access)
        self._call("cuMemSetAccess", address, size, byref(allowed), c_size_t(1))
        return address.value

    def words(self, address: int, size_bytes: int) -> torch.Tensor:
        """Return mapped memory as int32."""
        view = DeviceView(address, size_bytes, device=(DLPACK_CUDA, self._ordinal))
        return device_tensor(view, dtype=torch.int32, shape=(size_bytes // 4,))

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise Failed(f"{name} returned {result}", call=name, number=result)


def vmm_by_descriptor(rig: Rig) -> Numbers:
    """What memory by descriptor costs, and whether it may be mapped read-only."""
    if rig.is_fake:
        raise Skipped("the fake driver has no virtual memory")
    driver = Driver(rig.device.ordinal)
    handle, size = driver.create(min(rig.large_bytes, 512 * MIB))
    words = driver.words(driver.map(handle, size, READ_WRITE), size)
    fill(words, seed=9)
    torch.cuda.synchronize(rig.device.ordinal)
    started = time.perf_counter()
    fd = driver.export(handle)
    exported_us = (time.perf_counter() - started) * 1e6
    command = [sys.executable, "-m", "tests.gpu.vmm", str(rig.device.ordinal), str(fd), str(size)]
    done = subprocess.run(
        [*command, "9"], cwd=ROOT, pass_fds=(fd,), capture_output=True, text=True, timeout=60
    )
    os.close(fd)
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or ["the reader failed"])[-1])
    said: Numbers = json.loads(done.stdout.strip().splitlines()[-1])
    numbers: Numbers = {"size_bytes": size, "export_us": round(exported_us, 1), **said}
    if said["wrong_words"]:
        raise Failed("other words were read", **numbers)
    return numbers


def read(ordinal: int, fd: int, size_bytes: int, seed: int) -> Numbers:
    """Map a descriptor read-only, where that is allowed, and compare."""
    driver = Driver(ordinal)
    started = time.perf_counter()
    handle = driver.take(fd)
    taken = time.perf_counter()
    is_read_only = True
    try:
        address = driver.map(handle, size_bytes, READ)
    except Failed:
        is_read_only = False
        address = driver.map(handle, size_bytes, READ_WRITE)
    mapped = time.perf_counter()
    return {
        "import_us": round((taken - started) * 1e6, 1),
        "map_us": round((mapped - taken) * 1e6, 1),
        "is_read_only": is_read_only,
        "wrong_words": wrong_words(driver.words(address, size_bytes), seed=seed),
    }


if __name__ == "__main__":
    print(json.dumps(read(*(int(each) for each in sys.argv[1:]))))  # noqa: T201
