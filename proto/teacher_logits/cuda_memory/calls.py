"""The calls of the CUDA driver that we use, with plain numbers and bytes on both sides.

Two modules give them: ``cuda_bindings`` (NVIDIA's package) and ``cuda_ctypes`` (libcuda itself).
Each method is a function of the CUDA driver API, under its name there without ``_v2``, and
returns that function's ``CUresult``, then what it found. Contexts, streams, events and addresses
are plain integers. Nothing here decides anything; see ``cuda_memory``.

Names, numbers and sizes: CUDA driver API reference, https://docs.nvidia.com/cuda/cuda-driver-api/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from teacher_logits.device_memory import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

SUCCESS = 0
INVALID_VALUE = 1
NOT_INITIALIZED = 3
STUB_LIBRARY = 34
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
NOT_READY = 600
NOT_SUPPORTED = 801
UNKNOWN = 999

UUID_BYTES = 16
NAME_BYTES = 256

# CUpointer_attribute
MEMORY_TYPE = 2
IS_MANAGED = 8
DEVICE_ORDINAL = 9
IS_LEGACY_CUDA_IPC_CAPABLE = 10
RANGE_START_ADDR = 11
RANGE_SIZE = 12
MEMPOOL_HANDLE = 17

# CUmemorytype
TYPE_HOST = 1
TYPE_DEVICE = 2

# CUdevice_attribute
READ_ONLY_HOST_REGISTER_SUPPORTED = 113

EVENT_DISABLE_TIMING = 2
LAZY_ENABLE_PEER_ACCESS = 1
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_READ_ONLY = 8

_WAYS_OUT = {
    2: "free device memory (torch.cuda.empty_cache() returns what torch keeps), or ask for less",
    3: "after a fork start afresh: multiprocessing's spawn or forkserver",
    201: "a process cannot open a handle of its own, nor one from another PID namespace",
    217: "the two devices cannot reach one another's memory: use one device for both",
    801: "this device or driver does not have it (MIG has no CUDA IPC)",
}


class DriverCalls(Protocol):
    """The functions; each returns its ``CUresult`` first."""

    @property
    def source(self) -> str:
        """Where they come from, for messages."""

    def cuInit(self) -> int: ...
    def cuDriverGetVersion(self) -> tuple[int, int]: ...
    def cuGetErrorName(self, result: int) -> str: ...
    def cuGetErrorString(self, result: int) -> str: ...
    def cuDeviceGetCount(self) -> tuple[int, int]: ...
    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]: ...
    def cuDeviceGetName(self, device: int) -> tuple[int, str]: ...
    def cuDeviceGetUuid(self, device: int) -> tuple[int, bytes]: ...
    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]: ...
    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]: ...
    def cuCtxPushCurrent(self, context: int) -> int: ...
    def cuCtxPopCurrent(self) -> tuple[int, int]: ...
    def cuCtxSynchronize(self) -> int: ...
    def cuMemAlloc(self, size_bytes: int) -> tuple[int, int]: ...
    def cuMemFree(self, address: int) -> int: ...
    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]: ...
    def cuPointerGetAttributes(
        self, attributes: Sequence[int], address: int
    ) -> tuple[int, list[int]]: ...
    def cuIpcGetMemHandle(self, address: int) -> tuple[int, bytes]: ...
    def cuIpcOpenMemHandle(self, handle: bytes, flags: int) -> tuple[int, int]: ...
    def cuIpcCloseMemHandle(self, address: int) -> int: ...
    def cuMemcpyDtoH(self, target: int, source: int, size_bytes: int) -> int: ...
    def cuMemcpyHtoD(self, target: int, source: int, size_bytes: int) -> int: ...
    def cuStreamSynchronize(self, stream: int) -> int: ...
    def cuEventCreate(self, flags: int) -> tuple[int, int]: ...
    def cuEventRecord(self, event: int, stream: int) -> int: ...
    def cuEventQuery(self, event: int) -> int: ...
    def cuEventSynchronize(self, event: int) -> int: ...
    def cuEventDestroy(self, event: int) -> int: ...
    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> int: ...
    def cuMemHostUnregister(self, address: int) -> int: ...


FUNCTIONS = tuple(sorted(name for name in vars(DriverCalls) if name.startswith("cu")))


def refused(calls: DriverCalls, result: int, call: str) -> DeviceError:
    """Return the error for what a call returned: its number, the driver's name of it, a way out."""
    name = calls.cuGetErrorName(result) or "an error without a name"
    words = calls.cuGetErrorString(result)
    way_out = f": {_WAYS_OUT[result]}" if result in _WAYS_OUT else ""
    said = f" ({words})" if words else ""
    return DeviceError(
        f"{call}: {name} ({result}){said}{way_out}", number=result, name=name, call=call
    )


def check(calls: DriverCalls, result: int, call: str) -> None:
    """Raise ``DeviceError`` unless a call succeeded."""
    if result != SUCCESS:
        raise refused(calls, result, call)
