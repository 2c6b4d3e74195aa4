"""Buffers that publishers own: device memory that is registered once, then named by offsets.

    buffer = publisher.register(storage)             # once; `storage` is any tensor over all of it
    buffer.wait_free()                               # nobody reads what was published there
    ...                                              # the teacher's own kernels write views of it
    with publisher.reserve(step, input_ids=ids, columns={"topk_ids": ids_view, ...}):
        pass                                         # checked and sealed; nothing was copied

The memory stays its owner's, and the tensor that was registered is kept alive until the buffer is
closed, or its publisher, and no reader has it open; the server hands the driver's handle on and
opens nothing. What is still read, or may yet be, when the publisher is closed, is kept for good.

Refuses memory that no other process could open: of expandable segments, of stream-ordered pools,
managed or of the host, with the setting that changes it (docs/gpu.md, "Memory that the teacher
owns").
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, TypeAlias

import torch

from teacher_logits.device_memory import MemoryKind
from teacher_logits.errors import NotAvailable, RequestInvalidError
from teacher_logits.pool import PAGE_BYTES
from teacher_logits_client.config import check_timeout
from teacher_logits_client.slabs.device_slab_maker import PublishedDeviceSlab, slab_between
from teacher_logits_client.slabs.own_slabs import OwnSlabs
from teacher_logits_client.slabs.placed_columns import Registered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from teacher_logits.device_memory import Device, DeviceMemory
    from teacher_logits_client.slabs.claims import Way
    from teacher_logits_client.slabs.own_memory import OwnMemory

Storage: TypeAlias = "torch.Tensor"
"""A tensor over all of a buffer."""

ROW_PAGES = 64
"""Pages behind a buffer's last byte for the columns over rows of what lies there last."""

_WAYS_OUT = {
    MemoryKind.VIRTUAL: "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
    MemoryKind.POOL: "use torch's own allocator (PYTORCH_CUDA_ALLOC_CONF=backend:native), or "
    "cudaMalloc instead of cudaMallocAsync",
    MemoryKind.MANAGED: "allocate it with cudaMalloc instead of cudaMallocManaged",
    MemoryKind.HOST: "allocate it on the device, or open the publisher without a device",
    MemoryKind.UNKNOWN: "give a tensor on the publisher's device",
}


class OwnBuffer:
    """Device memory that its owner registered; ``Publisher.register`` makes one."""

    def __init__(self, slab: PublishedDeviceSlab, *, memory: OwnMemory) -> None:
        """Take over a slab that was passed to the server."""
        self.slab_id = slab.slab_id
        self.size_bytes = slab.device_bytes
        self.device_uuid = slab.device.uuid
        self._slab = slab
        self._memory = memory

    def wait_free(self, *, timeout: float = 60.0) -> None:
        """Wait until nobody reads what was published from it: then it may be written anew.

        Raises:
            DeadlinePassedError: somebody reads it after ``timeout`` seconds, with whom.
            SessionExpiredError: its publisher was closed while somebody read it, or might yet; it
                is kept alive until this process ends.
        """
        until = time.monotonic() + check_timeout(timeout, what="wait_free")
        self._memory.wait_placed(self.slab_id, until=until)

    def close(self, *, timeout: float = 60.0) -> None:
        """Wait until nobody reads it, and have readers let go of it; again is fine.

        They do so soon, idle ones too, and not before this returns. The tensor is kept alive as
        long; to free its memory in another way before is undefined: see ``is_open_elsewhere``.

        Raises:
            DeadlinePassedError: as for ``wait_free``; it stays registered.
            SessionExpiredError: as for ``wait_free``.
        """
        until = time.monotonic() + check_timeout(timeout, what="close")
        self._memory.unregister(self.slab_id, until=until)

    @property
    def is_open_elsewhere(self) -> bool:
        """Whether some reader has it open: what was closed may be freed once none has."""
        return self._slab.is_open_elsewhere()

    def __repr__(self) -> str:
        return f"<OwnBuffer {self.slab_id} of {self.size_bytes} bytes on {self.device_uuid}>"


def register(way: Way, storage: Storage) -> OwnBuffer:
    """Register the memory of a tensor; see ``Publisher.register``.

    Raises:
        RequestInvalidError: the tensor is not contiguous or empty, or lies where no other process
            could open it.
        DeviceError: the driver refuses to export it.
        NotAvailable: the system has no memory or descriptor for what belongs to it on the host.
    """
    if not isinstance(way, OwnSlabs) or way.probe is None:
        raise RequestInvalidError(
            "memory is registered with a publisher that shares a device's memory: open it with "
            "device= (and see its `refusals`, where it was)"
        )
    memory, device = way.probe.memory, way.probe.device
    if not isinstance(storage, torch.Tensor) or storage.layout is not torch.strided:
        kind = type(storage).__name__
        raise RequestInvalidError(
            f"a {kind} was given: give a dense torch.Tensor over all of the buffer",
            facts={"given": kind},
        )
    if not storage.is_contiguous() or storage.nbytes == 0:
        raise RequestInvalidError(
            f"a buffer of shape {tuple(storage.shape)} with strides {storage.stride()} was given: "
            "give a contiguous tensor over all of the memory, such as torch.empty(bytes, "
            "dtype=torch.uint8, device=...)",
            facts={"size_bytes": storage.nbytes},
        )
    _check_place(storage, memory=memory, device=device)
    _check_apart(storage, way.registered.values())
    slab = _slab_of(storage, memory=memory, device=device)
    registered = Registered(
        slab_id=slab.slab_id,
        address=storage.data_ptr(),
        size_bytes=storage.nbytes,
        room_bytes=slab.size_bytes,
    )
    way.memory.register(slab, registered)
    return OwnBuffer(slab, memory=way.memory)


def _slab_of(storage: Storage, *, memory: DeviceMemory, device: Device) -> PublishedDeviceSlab:
    try:
        return PublishedDeviceSlab(
            f"slab-{secrets.token_hex(6)}-own",
            storage.nbytes,
            memory=memory,
            device=device,
            address=storage.data_ptr(),
            owner=storage,
            row_bytes=ROW_PAGES * PAGE_BYTES,
        )
    except OSError as error:
        raise NotAvailable(
            f"the system gave nothing to keep the buffer's rows in on the host ({error.strerror}): "
            "raise the limit of open files (ulimit -n), or give the process more memory",
            facts={"errno": error.errno or 0},
        ) from error


def _check_apart(storage: Storage, others: Iterable[Registered]) -> None:
    """Refuse memory that is registered, or a pool's: neither would know what lies there."""
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes
    pool_slab = slab_between(start, end)
    if pool_slab is not None:
        raise RequestInvalidError(
            f"{storage.nbytes} bytes at {start:#x} were given, and they lie in {pool_slab.slab_id} "
            "of a publisher's own pool, which drafts write to: give memory of your own",
            facts={"size_bytes": storage.nbytes, "slab_id": pool_slab.slab_id},
        )
    for other in others:
        if start < other.address + other.size_bytes and other.address < end:
            raise RequestInvalidError(
                f"{storage.nbytes} bytes at {start:#x} were given, and {other.size_bytes} at "
                f"{other.address:#x} are registered as {other.slab_id}: register each buffer "
                "once, or close that one first",
                facts={"size_bytes": storage.nbytes, "slab_id": other.slab_id},
            )


def _check_place(storage: Storage, *, memory: DeviceMemory, device: Device) -> None:
    place = memory.locate(storage.data_ptr())
    if place.kind is not MemoryKind.PLAIN:
        raise RequestInvalidError(
            f"the buffer lies in {place.kind.value}, which no other process can open: "
            f"{_WAYS_OUT[place.kind]}",
            facts={"kind": place.kind.name.lower(), "device": str(storage.device)},
        )
    if place.device is None or place.device.uuid != device.uuid:
        there = place.device.uuid if place.device is not None else "an unknown device"
        raise RequestInvalidError(
            f"the buffer lies on {there}, and the publisher was opened for {device.uuid}: open it "
            "with the device of its buffers",
            facts={"buffer_device": there, "publisher_device": device.uuid},
        )
