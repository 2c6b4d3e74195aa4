"""Views of device memory, and tensors over them by DLPack: nothing is copied.

A tensor keeps its ``DeviceView`` alive, and so whoever owns the memory learns from that object's
end that no tensor over it is left, as with a ``memoryview`` of host memory. The bytes cross as
uint8 and are then viewed as what they are: DLPack has no settled name for every type (fp8).

    view = DeviceView(address, size_bytes, device=memory.view_device(device), owner=slab)
    device_tensor(view, dtype=torch.bfloat16, shape=(P, K), offset_bytes=256)

Promises: any thread may make a tensor, and any may drop the last; nothing is locked for either.
Refuses what reaches beyond the view. The DLPack structures: https://dmlc.github.io/dlpack/.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import from_dlpack

if TYPE_CHECKING:
    from collections.abc import Sequence

DLPACK_CPU = 1
DLPACK_CUDA = 2

_UNSIGNED = 1
_NAME = b"dltensor"


class DeviceView:
    """A run of bytes at an address of a device; ``owner`` is what must live while it is viewed.

    ``dlpack_device`` is (type, number) as DLPack counts them. Can be referred to weakly.
    """

    __slots__ = ("__weakref__", "address", "dlpack_device", "owner", "size_bytes")

    def __init__(
        self, address: int, size_bytes: int, *, device: tuple[int, int], owner: object = None
    ) -> None:
        if address < 0 or size_bytes < 0 or address + size_bytes > 1 << 64:
            raise ValueError(f"no memory can have {size_bytes} bytes at address {address}")
        self.address = address
        self.size_bytes = size_bytes
        self.dlpack_device = device
        self.owner = owner

    def __repr__(self) -> str:
        kind, number = self.dlpack_device
        return f"<{self.size_bytes} bytes at {self.address:#x} of DLPack device {kind}:{number}>"

    @property
    def torch_device(self) -> torch.device:
        """The device that tensors over it are on."""
        kind, number = self.dlpack_device
        return torch.device("cpu") if kind == DLPACK_CPU else torch.device("cuda", number)


def device_tensor(
    view: DeviceView, *, dtype: torch.dtype, shape: Sequence[int], offset_bytes: int = 0
) -> torch.Tensor:
    """Return a tensor, C-contiguous, over bytes of a view from ``offset_bytes`` on.

    Raises:
        ValueError: it would reach beyond the view, or not start at a whole element.
    """
    size = math.prod(shape) * dtype.itemsize
    if min(offset_bytes, size, *shape, 0) < 0 or offset_bytes + size > view.size_bytes:
        raise ValueError(
            f"{size} bytes of {dtype} at offset {offset_bytes} reach beyond a view of "
            f"{view.size_bytes} bytes"
        )
    if (view.address + offset_bytes) % dtype.itemsize:
        raise ValueError(f"address {view.address + offset_bytes:#x} starts no element of {dtype}")
    if size == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=view.torch_device)
    return _bytes_tensor(view, offset_bytes, size).view(dtype).view(tuple(shape))


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """``DLManagedTensor``, and behind it the shape and strides that it points at."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


# The deleter is one of C: it may run in any thread, while an exception is on its way, and after
# the interpreter's end, where one of Python may not.
_allocate = ctypes.pythonapi.PyMem_RawMalloc
_allocate.restype = ctypes.c_void_p
_allocate.argtypes = (ctypes.c_size_t,)
_DELETER = ctypes.cast(ctypes.pythonapi.PyMem_RawFree, ctypes.c_void_p)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _bytes_tensor(view: DeviceView, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    """Return a uint8 tensor over some bytes. Its storage keeps the view, and all over it do."""
    kind, number = view.dlpack_device
    if kind == DLPACK_CUDA:
        torch.cuda.init()  # a failure of it here is an error, and inside torch's reader a crash
    place = _allocate(ctypes.sizeof(_Managed))
    if place is None:
        raise MemoryError
    managed = _Managed.from_address(place)
    managed.tensor = _Tensor(
        data=view.address + offset_bytes,
        device=_Device(kind, number),
        ndim=1,
        dtype=_Type(_UNSIGNED, 8, 1),
        shape=ctypes.cast(place + _Managed.size.offset, ctypes.POINTER(ctypes.c_int64)),
        strides=ctypes.cast(place + _Managed.stride.offset, ctypes.POINTER(ctypes.c_int64)),
        byte_offset=0,
    )
    managed.context = None
    managed.deleter = _DELETER
    managed.size = size_bytes
    managed.stride = 1
    # The capsule points at its name for good: a constant of this module.
    tensor = from_dlpack(_new_capsule(place, _NAME, None))
    tensor.untyped_storage().device_view = view  # type: ignore[attr-defined]
    return tensor
