"""Device memory over the CUDA driver: ``DeviceMemory`` as it is on a real device.

Legacy IPC and plain allocations, by the driver's own calls (``cuda_calls``); nothing of torch's
private formats and counters is used, and torch only to ask which stream is the caller's.

Promises: a device's context is made at its first use, and no call leaves another one current than
it found (``cuda_contexts``). A handle is opened once a device, however often it is asked for. All
that the driver refuses is a ``DeviceError`` with the driver's number and name.

Not yet run on a device: until ``make gpu-check`` has, it is proven over a stand-in library alone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.cuda_memory import by_bindings as cuda_bindings
from teacher_logits.cuda_memory import by_ctypes as cuda_ctypes
from teacher_logits.cuda_memory import calls as cuda_calls
from teacher_logits.cuda_memory.calls import check, refused
from teacher_logits.cuda_memory.contexts import Contexts
from teacher_logits.cuda_memory.events import CudaEvent, record
from teacher_logits.device_memory import (
    Device,
    DeviceError,
    ExportedMemory,
    MemoryKind,
    Whereabouts,
)
from teacher_logits.devices.views import DLPACK_CUDA
from teacher_logits.layout import round_up

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from teacher_logits.cuda_memory.calls import DriverCalls

BLOCK_BYTES = 2 << 20
"""What the driver hands over as a whole; memory of a multiple of it is nobody else's."""

_ATTRIBUTES = (
    cuda_calls.MEMORY_TYPE,
    cuda_calls.IS_MANAGED,
    cuda_calls.DEVICE_ORDINAL,
    cuda_calls.IS_LEGACY_CUDA_IPC_CAPABLE,
    cuda_calls.RANGE_START_ADDR,
    cuda_calls.RANGE_SIZE,
    cuda_calls.MEMPOOL_HANDLE,
)


@dataclass
class _Opened:
    """A handle that is open: asked for ``count`` times, given to the driver ``opens`` times."""

    handle: bytes
    address: int
    count: int = 0
    opens: int = 0


class CudaMemory:
    """``DeviceMemory`` over the driver's calls, in the process that made it."""

    def __init__(self, calls: DriverCalls) -> None:
        """See ``Contexts`` for what it raises; makes no context."""
        self._calls = calls
        self._contexts = Contexts(calls)
        # Guards the table; the driver is never called under it. A finaliser that closes a handle
        # may come in wherever this thread is, under the lock too.
        self._lock = threading.RLock()
        self._opened: dict[tuple[int, int], _Opened] = {}

    @property
    def source(self) -> str:
        """Where the driver's calls come from."""
        return self._calls.source

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that this process sees."""
        return self._contexts.devices

    # --- memory -------------------------------------------------------------

    def allocate(self, size_bytes: int, *, device: Device) -> int:
        """Return the address of new plain memory, which can be exported.

        In whole blocks: smaller memory is cut out of a block by the driver, and its handle would
        show readers the rest of the block (CUDA C++ programming guide, "Interprocess
        Communication").
        """
        whole = round_up(max(size_bytes, 1), BLOCK_BYTES)
        with self._on(device, "cuMemAlloc") as calls:
            result, address = calls.cuMemAlloc(whole)
            check(calls, result, f"cuMemAlloc of {whole} bytes")
        return address

    def free(self, address: int, *, device: Device) -> None:
        """Give memory back. To do so while a reader has it open is the caller's fault."""
        with self._on(device, "cuMemFree") as calls:
            check(calls, calls.cuMemFree(address), "cuMemFree")

    def locate(self, address: int) -> Whereabouts:
        """Return what lies at an address; makes no context."""
        self._contexts.check_process("cuPointerGetAttributes")
        result, found = self._calls.cuPointerGetAttributes(_ATTRIBUTES, address)
        if result in (cuda_calls.INVALID_VALUE, cuda_calls.INVALID_CONTEXT):
            return Whereabouts(kind=MemoryKind.UNKNOWN, device=None, base=0, allocation_bytes=0)
        check(self._calls, result, "cuPointerGetAttributes")
        memory_type, is_managed, ordinal, is_plain, base, size_bytes, pool = found
        kind = _kind_of(memory_type, is_managed=is_managed, is_plain=is_plain, pool=pool)
        # The number is below 0, or huge where it came unsigned, for what is on no device.
        is_on_device = kind not in (MemoryKind.UNKNOWN, MemoryKind.HOST)
        device = self._contexts.at(ordinal) if is_on_device else None
        if device is not None and not size_bytes:
            base, size_bytes = self._range(address, device)
        return Whereabouts(kind=kind, device=device, base=base, allocation_bytes=size_bytes)

    # --- hand-over ----------------------------------------------------------

    def export(self, address: int) -> ExportedMemory:
        """Return what another process needs to read the allocation that an address lies in."""
        device = self.locate(address).device
        if device is None:
            raise refused(
                self._calls, cuda_calls.INVALID_VALUE, f"cuIpcGetMemHandle at {address:#x}"
            )
        with self._on(device, "cuIpcGetMemHandle") as calls:
            base, size_bytes = self._range(address, device)
            result, handle = calls.cuIpcGetMemHandle(address)
            check(calls, result, "cuIpcGetMemHandle")
        return ExportedMemory(
            handle=handle,
            device_uuid=device.uuid,
            base_offset_bytes=address - base,
            allocation_bytes=size_bytes,
        )

    def open(self, handle: bytes, *, device: Device) -> int:
        """Return the address of an exported allocation's first byte, in this process."""
        self._contexts.check_process("cuIpcOpenMemHandle")
        with self._lock:
            for key, opened in tuple(self._opened.items()):
                if key[0] == device.ordinal and opened.handle == handle:
                    opened.count += 1
                    if self._opened.get(key) is opened:  # else a finaliser has just closed it
                        return opened.address
        with self._on(device, "cuIpcOpenMemHandle") as calls:
            result, address = calls.cuIpcOpenMemHandle(handle, cuda_calls.LAZY_ENABLE_PEER_ACCESS)
            check(calls, result, "cuIpcOpenMemHandle")
        with self._lock:  # another thread may have opened it as well: the driver counts, too
            key = device.ordinal, address
            opened = self._opened.setdefault(key, _Opened(handle=handle, address=address))
            opened.count += 1
            opened.opens += 1
        return address

    def close(self, address: int, *, device: Device) -> None:
        """Undo one ``open``; the last one unmaps."""
        self._contexts.check_process("cuIpcCloseMemHandle")
        with self._lock:
            opened = self._opened.get((device.ordinal, address))
            if opened is not None:
                opened.count -= 1
                if opened.count:
                    return
                del self._opened[device.ordinal, address]
        with self._on(device, "cuIpcCloseMemHandle") as calls:
            for _ in range(opened.opens if opened is not None else 1):
                check(calls, calls.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")

    # --- copies and order ---------------------------------------------------

    def copy_to_host(self, target: memoryview, address: int, *, device: Device) -> None:
        """Fill ``target`` from device memory; waits for no stream but the default one."""
        if not target.nbytes:
            return
        place = ctypes.addressof(ctypes.c_char.from_buffer(target.cast("B")))
        with self._on(device, "cuMemcpyDtoH") as calls:
            check(calls, calls.cuMemcpyDtoH(place, address, target.nbytes), "cuMemcpyDtoH")

    def copy_to_device(self, address: int, source: memoryview, *, device: Device) -> None:
        """Write ``source`` to device memory, and return when it is written."""
        if not source.nbytes:
            return
        copy = ctypes.create_string_buffer(bytes(source), source.nbytes)
        place = ctypes.addressof(copy)
        with self._on(device, "cuMemcpyHtoD") as calls:
            check(calls, calls.cuMemcpyHtoD(address, place, source.nbytes), "cuMemcpyHtoD")
            # A small copy may return before the device has it.
            check(calls, calls.cuStreamSynchronize(0), "cuStreamSynchronize")

    def record(self, *, device: Device) -> CudaEvent:
        """Return the point behind all work in the caller's current stream of a device."""
        return record(self._contexts, device)

    def synchronise(self, *, device: Device) -> None:
        """Wait on the host for all work that this process has given a device."""
        with self._on(device, "cuCtxSynchronize") as calls:
            check(calls, calls.cuCtxSynchronize(), "cuCtxSynchronize")

    def pin(self, address: int, size_bytes: int) -> None:
        """Let devices read pages of host memory, mapped read-only or not, without a staging copy.

        Pinned for every device; a context is made for it only where there is none yet.
        """
        device = self._contexts.any_device()
        flags = cuda_calls.HOST_REGISTER_PORTABLE
        if self._contexts.attribute(cuda_calls.READ_ONLY_HOST_REGISTER_SUPPORTED, device):
            flags |= cuda_calls.HOST_REGISTER_READ_ONLY
        with self._on(device, "cuMemHostRegister") as calls:
            check(calls, calls.cuMemHostRegister(address, size_bytes, flags), "cuMemHostRegister")

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        with self._on(self._contexts.any_device(), "cuMemHostUnregister") as calls:
            check(calls, calls.cuMemHostUnregister(address), "cuMemHostUnregister")

    def view_device(self, device: Device) -> tuple[int, int]:
        """Return DLPack's CUDA device of that number."""
        return DLPACK_CUDA, device.ordinal

    def check_process(self, call: str) -> None:
        """Refuse a forked child; see ``Contexts``."""
        self._contexts.check_process(call)

    def _range(self, address: int, device: Device) -> tuple[int, int]:
        """Return start and size of the allocation around an address of a device."""
        with self._on(device, "cuMemGetAddressRange") as calls:
            result, base, size_bytes = calls.cuMemGetAddressRange(address)
            check(calls, result, "cuMemGetAddressRange")
        return base, size_bytes

    def _on(self, device: Device, call: str) -> AbstractContextManager[DriverCalls]:
        return self._contexts.on(device, call)


_found: dict[int, CudaMemory | None] = {}
_finding = threading.Lock()


def find_driver() -> CudaMemory | None:
    """Return this process's driver; None where there is none, or no device. Makes no context.

    Raises:
        DeviceError: there is a driver and it does not start, or it was started before a fork.
    """
    with _finding:
        if not _found:
            _found[os.getpid()] = _start()
        ((pid, memory),) = _found.items()
    if pid != os.getpid():
        if memory is None:
            return None
        memory.check_process("cuInit")
    return memory


def _start() -> CudaMemory | None:
    calls = cuda_bindings.load() or cuda_ctypes.load()
    if calls is None:
        return None
    try:
        memory = CudaMemory(calls)
    except DeviceError as error:
        if error.number in (cuda_calls.STUB_LIBRARY, cuda_calls.NO_DEVICE):
            return None
        raise
    return memory if memory.devices() else None


def _kind_of(memory_type: int, *, is_managed: int, is_plain: int, pool: int) -> MemoryKind:
    """Say what the driver's attributes of an address mean; only plain memory has a handle."""
    if is_managed:
        return MemoryKind.MANAGED
    if memory_type == cuda_calls.TYPE_HOST:
        return MemoryKind.HOST
    if memory_type != cuda_calls.TYPE_DEVICE:
        return MemoryKind.UNKNOWN
    if pool:
        return MemoryKind.POOL
    return MemoryKind.PLAIN if is_plain else MemoryKind.VIRTUAL
