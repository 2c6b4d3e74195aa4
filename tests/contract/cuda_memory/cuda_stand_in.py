"""A driver's calls without a driver: the table of ``cuda_calls`` as a Python object. No test.

It keeps the rules that ``CudaMemory`` has to keep in turn: a current context a thread, pushed
and popped; work only in a context; opens that are counted. ``errors`` are the numbers that calls
are to return. What a real driver makes of all this, ``make gpu-check`` finds out.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HOST, DEVICE = 1, 2
FOREIGN = bytes([7]) * 64
"""The handle of another process's allocation, of one page."""


class StandIn:
    """``names`` are those of its devices; ``attributes`` of addresses are in the driver's order:
    type, managed, device, IPC capable, start, size, pool.
    """

    source = "a stand-in"

    def __init__(self, *names: str) -> None:
        self.names = names or ("NVIDIA X",)
        self.errors: dict[str, int] = {}
        self.attributes: dict[int, list[int]] = {}
        self.log: list[str] = []
        self.retained: Counter[int] = Counter()
        self.open_count: Counter[int] = Counter()
        self.given: list[tuple[str, tuple[object, ...]]] = []
        self.event_result = 0
        self.has_read_only = 1
        self._threads = threading.local()
        self._memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._numbers = itertools.count(0x5000)

    @property
    def stack(self) -> list[int]:
        """This thread's contexts, the current one last."""
        found: list[int] = self._threads.__dict__.setdefault("stack", [])
        return found

    def memory(self, size_bytes: int, *, device: int = 0) -> int:
        """Make plain memory of a device that is real memory here; return its address."""
        made = ctypes.create_string_buffer(size_bytes)
        address = ctypes.addressof(made)
        self._memory[address] = made
        self.attributes[address] = [DEVICE, 0, device, 1, address, size_bytes, 0]
        return address

    def _did(self, name: str, *given: object, needs_context: bool = True) -> int:
        self.log.append(name)
        self.given.append((name, given))
        if needs_context and not self.stack:
            return 201
        return self.errors.get(name, 0)

    def cuInit(self) -> int:
        return self._did("cuInit", needs_context=False)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return self._did("cuDriverGetVersion", needs_context=False), 13000

    def cuGetErrorName(self, result: int) -> str:
        return f"CUDA_ERROR_{result}"

    def cuGetErrorString(self, result: int) -> str:
        return f"words for {result}"

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return self._did("cuDeviceGetCount", needs_context=False), len(self.names)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return self._did("cuDeviceGet", ordinal, needs_context=False), ordinal + 10

    def cuDeviceGetName(self, device: int) -> tuple[int, str]:
        return self._did("cuDeviceGetName", device, needs_context=False), self.names[device - 10]

    def cuDeviceGetUuid(self, device: int) -> tuple[int, bytes]:
        return self._did("cuDeviceGetUuid", device, needs_context=False), bytes([device] * 16)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        result = self._did("cuDeviceGetAttribute", attribute, device, needs_context=False)
        return result, self.has_read_only

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        self.retained[device] += 1
        return self._did("cuDevicePrimaryCtxRetain", device, needs_context=False), 1000 + device

    def cuCtxPushCurrent(self, context: int) -> int:
        result = self._did("cuCtxPushCurrent", context, needs_context=False)
        if not result:
            self.stack.append(context)
        return result

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        result = self._did("cuCtxPopCurrent")
        return result, self.stack.pop() if self.stack else 0

    def cuCtxSynchronize(self) -> int:
        return self._did("cuCtxSynchronize")

    def cuMemAlloc(self, size_bytes: int) -> tuple[int, int]:
        result = self._did("cuMemAlloc", size_bytes)
        return result, 0 if result else self.memory(size_bytes, device=self.stack[-1] - 1010)

    def cuMemFree(self, address: int) -> int:
        return self._did("cuMemFree", address)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        result = self._did("cuMemGetAddressRange", address)
        found = self._around(address)
        return (result, found[4], found[5]) if found else (500, 0, 0)

    def cuPointerGetAttributes(
        self, attributes: Sequence[int], address: int
    ) -> tuple[int, list[int]]:
        result = self._did("cuPointerGetAttributes", *attributes, needs_context=False)
        found = self._around(address) or [0, 0, -2, 0, 0, 0, 0]
        kinds = dict(zip((2, 8, 9, 10, 11, 12, 17), found, strict=True))
        return result, [kinds[each] for each in attributes]

    def cuIpcGetMemHandle(self, address: int) -> tuple[int, bytes]:
        return self._did("cuIpcGetMemHandle", address), bytes([3]) * 64

    def cuIpcOpenMemHandle(self, handle: bytes, flags: int) -> tuple[int, int]:
        result = self._did("cuIpcOpenMemHandle", handle, flags)
        if result or handle != FOREIGN:
            return result or 201, 0
        device = self.stack[-1] - 1010
        self.open_count[device] += 1
        return 0, 0x7000 + device * 0x1000

    def cuIpcCloseMemHandle(self, address: int) -> int:
        result = self._did("cuIpcCloseMemHandle", address)
        device = (address - 0x7000) // 0x1000
        if self.open_count[device] < 1:
            return 1
        self.open_count[device] -= 1
        return result

    def cuMemcpyDtoH(self, target: int, source: int, size_bytes: int) -> int:
        ctypes.memmove(target, source, size_bytes)
        return self._did("cuMemcpyDtoH", target, source, size_bytes)

    def cuMemcpyHtoD(self, target: int, source: int, size_bytes: int) -> int:
        ctypes.memmove(target, source, size_bytes)
        return self._did("cuMemcpyHtoD", target, source, size_bytes)

    def cuStreamSynchronize(self, stream: int) -> int:
        return self._did("cuStreamSynchronize", stream)

    def cuEventCreate(self, flags: int) -> tuple[int, int]:
        return self._did("cuEventCreate", flags), next(self._numbers)

    def cuEventRecord(self, event: int, stream: int) -> int:
        return self._did("cuEventRecord", event, stream)

    def cuEventQuery(self, event: int) -> int:
        return self._did("cuEventQuery", event) or self.event_result

    def cuEventSynchronize(self, event: int) -> int:
        return self._did("cuEventSynchronize", event)

    def cuEventDestroy(self, event: int) -> int:
        return self._did("cuEventDestroy", event, needs_context=False)

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        return self._did("cuMemHostRegister", address, size_bytes, flags)

    def cuMemHostUnregister(self, address: int) -> int:
        return self._did("cuMemHostUnregister", address)

    def _around(self, address: int) -> list[int] | None:
        for start, found in self.attributes.items():
            if start <= address < start + max(found[5], 1):
                return found
        return None
