"""Opener for ``local``: reader and writer are one process, and the bytes are the writer's own.

Nothing is mapped or copied. What is read here must not be written into: there is no page
between reader and writer that could keep a change apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import SlabOpenError
from teacher_logits.slab import check_extent
from teacher_logits.transport import Transport
from teacher_logits_client.openers import extent_of, stale
from teacher_logits_client.openers.host_payload import HostPayload

if TYPE_CHECKING:
    from teacher_logits.inprocess import Resident
    from teacher_logits.payload import Extent
    from teacher_logits.slab import WriterSlab
    from teacher_logits.terms import LeaseTerms


class LocalPayload(HostPayload):
    """A payload in its writer's own slab."""

    copied = False

    def __init__(self, slab: WriterSlab, extent: Extent, size_bytes: int) -> None:
        """Take hold of the memory; ``SlabOpenError`` where its writer has closed it meanwhile."""
        room, self._slot = slab.opened(extent)
        super().__init__(room[:size_bytes])
        self._slab = slab
        self._extent = extent

    def is_current(self) -> bool:
        """Say whether the room still holds this payload; a closed slab is written no more."""
        return self._slab.fd < 0 or self.generation() == self._extent.generation

    def generation(self) -> int:
        """Return what the payload's slot holds."""
        return int(self._slot.value)

    def vacate(self) -> int:
        """Do nothing: the memory is the writer's."""
        return 0


class LocalOpener:
    """Finds slabs of a server that lives in this process."""

    transport = Transport.LOCAL

    def __init__(self, resident: Resident) -> None:
        self._resident = resident

    def open(self, lease: LeaseTerms, *, until: float) -> LocalPayload:
        """Return the writer's own memory. See ``Opener.open``."""
        extent = extent_of(lease, self.transport)
        try:
            slab = self._resident.find_slab(extent.slab_id)
        except KeyError:
            raise SlabOpenError(
                f"the server of this process has no slab {extent.slab_id} any more",
                facts={"slab_id": extent.slab_id},
            ) from None
        check_extent(extent, size_bytes=slab.size_bytes)
        opened = LocalPayload(slab, extent, lease.payload.size_bytes)
        if not opened.is_current():
            raise stale(lease, expected=extent.generation, found=opened.generation())
        return opened

    def close(self) -> None:
        """Keep nothing, so let go of nothing."""
