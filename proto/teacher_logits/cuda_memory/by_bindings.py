"""The driver's calls by ``cuda.bindings``, NVIDIA's package, which CUDA builds of torch bring.

It is optional: where it is missing, or finds no driver, ``load`` says so and ``cuda_ctypes`` is
used. Its functions return tuples of their result and objects; here they are plain numbers again.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import TYPE_CHECKING, Protocol, cast

from teacher_logits.cuda_memory.calls import NAME_BYTES, UNKNOWN, UUID_BYTES
from teacher_logits.device_memory import HANDLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PACKAGE = "cuda.bindings"


class _Placed(Protocol):
    """One of the package's structures: it says where it lies."""

    def getPtr(self) -> int: ...


class BindingsCalls:
    """``cuda_calls.DriverCalls`` over ``cuda.bindings.driver``."""

    def __init__(self, driver: object, *, version: str = "") -> None:
        self.source = f"{PACKAGE} {version}".strip()
        self._driver = driver

    def cuInit(self) -> int:
        return self._code("cuInit", 0)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return self._number("cuDriverGetVersion")

    def cuGetErrorName(self, result: int) -> str:
        return self._words("cuGetErrorName", result)

    def cuGetErrorString(self, result: int) -> str:
        return self._words("cuGetErrorString", result)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return self._number("cuDeviceGetCount")

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return self._number("cuDeviceGet", ordinal)

    def cuDeviceGetName(self, device: int) -> tuple[int, str]:
        result, found = self._call("cuDeviceGetName", NAME_BYTES, device)
        name = cast("bytes | None", found[0]) or b""
        return result, name.partition(b"\0")[0].decode(errors="replace")

    def cuDeviceGetUuid(self, device: int) -> tuple[int, bytes]:
        # Releases before 13 have the older function under this name, and ours with its suffix.
        name = "cuDeviceGetUuid_v2"
        name = name if hasattr(self._driver, name) else "cuDeviceGetUuid"
        result, found = self._call(name, device)
        return result, _read(found[0], UUID_BYTES)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return self._number(
            "cuDeviceGetAttribute", self._enum("CUdevice_attribute", attribute), device
        )

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return self._number("cuDevicePrimaryCtxRetain", device)

    def cuCtxPushCurrent(self, context: int) -> int:
        return self._code("cuCtxPushCurrent", context)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return self._number("cuCtxPopCurrent")

    def cuCtxSynchronize(self) -> int:
        return self._code("cuCtxSynchronize")

    def cuMemAlloc(self, size_bytes: int) -> tuple[int, int]:
        return self._number("cuMemAlloc", size_bytes)

    def cuMemFree(self, address: int) -> int:
        return self._code("cuMemFree", address)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        result, found = self._call("cuMemGetAddressRange", address)
        return result, _int(found[0]), _int(found[1])

    def cuPointerGetAttributes(
        self, attributes: Sequence[int], address: int
    ) -> tuple[int, list[int]]:
        names = [self._enum("CUpointer_attribute", each) for each in attributes]
        result, found = self._call("cuPointerGetAttributes", len(names), names, address)
        values = cast("Sequence[object] | None", found[0]) or [0] * len(names)
        return result, [_int(each) for each in values]

    def cuIpcGetMemHandle(self, address: int) -> tuple[int, bytes]:
        result, found = self._call("cuIpcGetMemHandle", address)
        return result, _read(found[0], HANDLE_BYTES)

    def cuIpcOpenMemHandle(self, handle: bytes, flags: int) -> tuple[int, int]:
        named = cast("Callable[[], _Placed]", self._driver.CUipcMemHandle)()  # type: ignore[attr-defined]
        ctypes.memmove(int(named.getPtr()), handle, HANDLE_BYTES)
        return self._number("cuIpcOpenMemHandle", named, flags)

    def cuIpcCloseMemHandle(self, address: int) -> int:
        return self._code("cuIpcCloseMemHandle", address)

    def cuMemcpyDtoH(self, target: int, source: int, size_bytes: int) -> int:
        return self._code("cuMemcpyDtoH", target, source, size_bytes)

    def cuMemcpyHtoD(self, target: int, source: int, size_bytes: int) -> int:
        return self._code("cuMemcpyHtoD", target, source, size_bytes)

    def cuStreamSynchronize(self, stream: int) -> int:
        return self._code("cuStreamSynchronize", stream)

    def cuEventCreate(self, flags: int) -> tuple[int, int]:
        return self._number("cuEventCreate", flags)

    def cuEventRecord(self, event: int, stream: int) -> int:
        return self._code("cuEventRecord", event, stream)

    def cuEventQuery(self, event: int) -> int:
        return self._code("cuEventQuery", event)

    def cuEventSynchronize(self, event: int) -> int:
        return self._code("cuEventSynchronize", event)

    def cuEventDestroy(self, event: int) -> int:
        return self._code("cuEventDestroy", event)

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        return self._code("cuMemHostRegister", address, size_bytes, flags)

    def cuMemHostUnregister(self, address: int) -> int:
        return self._code("cuMemHostUnregister", address)

    def _call(self, name: str, *arguments: object) -> tuple[int, tuple[object, ...]]:
        """Return a call's result and what it found, followed by None where that is too little."""
        try:
            result, *found = getattr(self._driver, name)(*arguments)
        except ValueError:  # a result that this release of the package does not know
            return UNKNOWN, (None, None)
        return int(result), (*found, None, None)

    def _code(self, name: str, *arguments: object) -> int:
        return self._call(name, *arguments)[0]

    def _number(self, name: str, *arguments: object) -> tuple[int, int]:
        result, found = self._call(name, *arguments)
        return result, _int(found[0])

    def _words(self, name: str, result: int) -> str:
        try:
            error = self._enum("CUresult", result)
        except ValueError:  # a number that this release of the package does not know
            return ""
        words = cast("bytes | None", self._call(name, error)[1][0])
        return (words or b"").decode(errors="replace")

    def _enum(self, name: str, value: int) -> object:
        return cast("Callable[[int], object]", getattr(self._driver, name))(value)


def load() -> BindingsCalls | None:
    """Return the driver's calls; None where the package is missing or finds no driver."""
    try:
        package = importlib.import_module(PACKAGE)
        driver = importlib.import_module(f"{PACKAGE}.driver")
        driver.cuDriverGetVersion()  # looks the library up; neither initialises nor makes contexts
    except (ImportError, RuntimeError):
        return None
    return BindingsCalls(driver, version=str(getattr(package, "__version__", "")))


def _int(found: object) -> int:
    """Return what a call found as a number: the package's addresses and handles convert."""
    return 0 if found is None else int(cast("int", found))


def _read(structure: object, size_bytes: int) -> bytes:
    if structure is None:
        return bytes(size_bytes)
    return ctypes.string_at(int(cast("_Placed", structure).getPtr()), size_bytes)
