"""Mapped payloads: a lease's bytes in a slab that is mapped here.

Where the pages are pinned, a device may read them after the call that had it do so: then the
memory is vacated once the device is done, as memory of the device's own is (``last_reads``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.openers.host_payload import HostPayload
from teacher_logits_client.openers.last_reads import LastRead, torch_device, torch_devices

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from teacher_logits.device_memory import DeviceMemory
    from teacher_logits.payload import Extent
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_client.openers.maps import ReaderSlab, Room


class SharedMemoryPayload(HostPayload):
    """A payload in a mapped slab.

    Args:
        vacate: makes its room fit for the next; returns the bytes that were dropped.
        pinner: what the slab's pages are pinned by, if they are.
    """

    copied = False

    def __init__(
        self,
        slab: ReaderSlab,
        lease: LeaseTerms,
        extent: Extent,
        *,
        room: Room,
        vacate: Callable[[], int],
        is_revoked: Callable[[], bool],
        pinner: DeviceMemory | None = None,
    ) -> None:
        super().__init__(room.view[: lease.payload.size_bytes])
        self.slab = slab
        self._extent = extent
        self._vacate = vacate
        self._is_revoked = is_revoked
        self._pinner = pinner
        self._last_read: LastRead | None = None

    def is_current(self) -> bool:
        """Say whether the room still holds this payload, and will while the lease is open."""
        current = self.slab.generation(self._extent.slot) == self._extent.generation
        return current and not self._is_revoked()

    def note_stream(self, stream: torch.cuda.Stream) -> None:
        """Have another stream waited for, where the pages are pinned."""
        last_read = self._reads()
        if last_read is not None:
            last_read.note_stream(stream)

    def finish(self, *, outlived: bool) -> None:
        """Note which copies to a device are under way, where the pages are pinned."""
        last_read = self._reads()
        if last_read is not None:
            last_read.finish(outlived=outlived)

    def vacate(self) -> int:
        """Drop the pages that were dirtied; return their bytes."""
        if self._last_read is not None and self._last_read.is_known:
            self._last_read.wait()
        elif self._pinner is not None:  # dropped, or outlived: by what device is not known
            for device in torch_devices(self._pinner):
                self._pinner.synchronise(device=device)
        return self._vacate()

    def _reads(self) -> LastRead | None:
        """Return the reads of the device that its owner works with; None where it has none."""
        if self._last_read is None and self._pinner is not None:
            device = torch_device(self._pinner)
            self._last_read = None if device is None else LastRead(self._pinner, device)
        return self._last_read
