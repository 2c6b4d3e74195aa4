"""The driver's calls by ctypes, over libcuda: what every machine with an NVIDIA driver has.

Where a function has a ``_v2``, that is the one that NVIDIA's headers have meant since CUDA 4, or
11 (``cuDeviceGetUuid``, ``cuIpcOpenMemHandle``, ``cuMemHostRegister``). ctypes lets the GIL go
during each call.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING

from teacher_logits.cuda_memory.calls import NAME_BYTES, UUID_BYTES
from teacher_logits.device_memory import HANDLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARY = "libcuda.so.1"

SYMBOLS = {
    "cuCtxPopCurrent": "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent": "cuCtxPushCurrent_v2",
    "cuDeviceGetUuid": "cuDeviceGetUuid_v2",
    "cuEventDestroy": "cuEventDestroy_v2",
    "cuIpcOpenMemHandle": "cuIpcOpenMemHandle_v2",
    "cuMemAlloc": "cuMemAlloc_v2",
    "cuMemFree": "cuMemFree_v2",
    "cuMemGetAddressRange": "cuMemGetAddressRange_v2",
    "cuMemHostRegister": "cuMemHostRegister_v2",
    "cuMemcpyDtoH": "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD": "cuMemcpyHtoD_v2",
}
"""The symbols in the library of functions that have more than one."""


class MemoryHandle(ctypes.Structure):
    """``CUipcMemHandle``, which crosses by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CtypesCalls:
    """``cuda_calls.DriverCalls`` over a library."""

    def __init__(self, library: ctypes.CDLL, *, name: str = LIBRARY) -> None:
        self.source = f"{name} by ctypes"
        self._library = library

    def cuInit(self) -> int:
        return self._call("cuInit", c_uint(0))

    def cuDriverGetVersion(self) -> tuple[int, int]:
        version = c_int()
        return self._call("cuDriverGetVersion", byref(version)), version.value

    def cuGetErrorName(self, result: int) -> str:
        return self._words("cuGetErrorName", result)

    def cuGetErrorString(self, result: int) -> str:
        return self._words("cuGetErrorString", result)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        count = c_int()
        return self._call("cuDeviceGetCount", byref(count)), count.value

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        device = c_int()
        return self._call("cuDeviceGet", byref(device), c_int(ordinal)), device.value

    def cuDeviceGetName(self, device: int) -> tuple[int, str]:
        name = ctypes.create_string_buffer(NAME_BYTES)
        result = self._call("cuDeviceGetName", name, c_int(NAME_BYTES), c_int(device))
        return result, name.value.decode(errors="replace")

    def cuDeviceGetUuid(self, device: int) -> tuple[int, bytes]:
        uuid = ctypes.create_string_buffer(UUID_BYTES)
        return self._call("cuDeviceGetUuid", uuid, c_int(device)), uuid.raw

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        value = c_int()
        result = self._call("cuDeviceGetAttribute", byref(value), c_int(attribute), c_int(device))
        return result, value.value

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        context = c_void_p()
        result = self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
        return result, context.value or 0

    def cuCtxPushCurrent(self, context: int) -> int:
        return self._call("cuCtxPushCurrent", c_void_p(context))

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        context = c_void_p()
        return self._call("cuCtxPopCurrent", byref(context)), context.value or 0

    def cuCtxSynchronize(self) -> int:
        return self._call("cuCtxSynchronize")

    def cuMemAlloc(self, size_bytes: int) -> tuple[int, int]:
        address = c_uint64()
        return self._call("cuMemAlloc", byref(address), c_size_t(size_bytes)), address.value

    def cuMemFree(self, address: int) -> int:
        return self._call("cuMemFree", c_uint64(address))

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        base, size = c_uint64(), c_size_t()
        result = self._call("cuMemGetAddressRange", byref(base), byref(size), c_uint64(address))
        return result, base.value, size.value

    def cuPointerGetAttributes(
        self, attributes: Sequence[int], address: int
    ) -> tuple[int, list[int]]:
        count = len(attributes)
        names = (c_uint * count)(*attributes)
        # Each value is of its own size, 1 to 8 bytes; the rest of its place stays 0.
        values = (c_uint64 * count)()
        places = (c_void_p * count)(*(ctypes.addressof(values) + 8 * i for i in range(count)))
        result = self._call(
            "cuPointerGetAttributes", c_uint(count), names, places, c_uint64(address)
        )
        return result, list(values)

    def cuIpcGetMemHandle(self, address: int) -> tuple[int, bytes]:
        handle = MemoryHandle()
        return self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address)), bytes(handle)

    def cuIpcOpenMemHandle(self, handle: bytes, flags: int) -> tuple[int, int]:
        address = c_uint64()
        named = MemoryHandle.from_buffer_copy(handle)
        result = self._call("cuIpcOpenMemHandle", byref(address), named, c_uint(flags))
        return result, address.value

    def cuIpcCloseMemHandle(self, address: int) -> int:
        return self._call("cuIpcCloseMemHandle", c_uint64(address))

    def cuMemcpyDtoH(self, target: int, source: int, size_bytes: int) -> int:
        return self._call("cuMemcpyDtoH", c_void_p(target), c_uint64(source), c_size_t(size_bytes))

    def cuMemcpyHtoD(self, target: int, source: int, size_bytes: int) -> int:
        return self._call("cuMemcpyHtoD", c_uint64(target), c_void_p(source), c_size_t(size_bytes))

    def cuStreamSynchronize(self, stream: int) -> int:
        return self._call("cuStreamSynchronize", c_void_p(stream))

    def cuEventCreate(self, flags: int) -> tuple[int, int]:
        event = c_void_p()
        return self._call("cuEventCreate", byref(event), c_uint(flags)), event.value or 0

    def cuEventRecord(self, event: int, stream: int) -> int:
        return self._call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def cuEventQuery(self, event: int) -> int:
        return self._call("cuEventQuery", c_void_p(event))

    def cuEventSynchronize(self, event: int) -> int:
        return self._call("cuEventSynchronize", c_void_p(event))

    def cuEventDestroy(self, event: int) -> int:
        return self._call("cuEventDestroy", c_void_p(event))

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        return self._call(
            "cuMemHostRegister", c_void_p(address), c_size_t(size_bytes), c_uint(flags)
        )

    def cuMemHostUnregister(self, address: int) -> int:
        return self._call("cuMemHostUnregister", c_void_p(address))

    def _call(self, name: str, *arguments: object) -> int:
        # ctypes gives a function the result type c_int unless it is told otherwise.
        result: int = getattr(self._library, SYMBOLS.get(name, name))(*arguments)
        return result

    def _words(self, name: str, result: int) -> str:
        words = c_char_p()
        self._call(name, c_int(result), byref(words))
        return (words.value or b"").decode(errors="replace")


def load(path: str = LIBRARY) -> CtypesCalls | None:
    """Return the driver's calls; None where there is no such library."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    return CtypesCalls(library, name=path.rpartition("/")[2])
