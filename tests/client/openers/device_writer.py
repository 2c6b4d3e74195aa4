"""A writer with device memory, for the tests of what reads it: its driver is in another process."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.client.losses.shards import Shard, shard_of, some_ids

from teacher_logits.device_memory import DeviceMemoryPart
from teacher_logits.layout import is_on_device, round_up
from teacher_logits.payload import Extent
from teacher_logits.slab import WriterSlab
from teacher_logits.terms import LeaseTerms
from teacher_logits_client.line import PassedSlab

if TYPE_CHECKING:
    from tests.fake_cuda.child import Child

PAGE = 4096
IDS = some_ids(6, seed=4)
NEVER = float("inf")


class DeviceWriter:
    """One device slab and what its writer does with it. The twin is of this process."""

    def __init__(self, child: Child, *, pages: int = 8, name: str = "slab") -> None:
        self.child = child
        self.size_bytes = pages * PAGE
        self.address = child.number("allocate", self.size_bytes)
        self.exported = child.export(self.address)
        self.twin = WriterSlab(name, self.size_bytes, is_sparse=True)
        #: How often it was passed, and whether its device's part is.
        self.passed = 0
        self.passes_device = True

    def close(self) -> None:
        """Let go of both parts."""
        self.twin.close()

    def lease(
        self,
        shard: Shard | None = None,
        *,
        page: int = 0,
        generation: int = 2,
        on_device: bool = True,
    ) -> LeaseTerms:
        """Write a payload, and lease it; without ``on_device`` it has a host copy as well."""
        shard = shard or shard_of(IDS)
        payload = replace(shard.payload, payload_id=f"p-{page}-{generation}")
        extent = Extent(
            slab_id=self.twin.slab_id,
            offset_bytes=page * PAGE,
            size_bytes=round_up(payload.size_bytes, PAGE),
            slot=page,
            generation=generation,
        )
        self.twin.mark(page, generation - 1)
        room = self.twin.room(extent)
        for column in payload.columns:
            data = shard.data[column.offset_bytes : column.end_bytes]
            if is_on_device(column.kind):
                at = self.address + extent.offset_bytes + column.offset_bytes
                self.child.ask("write", at, data, device=None)
            if not on_device or not is_on_device(column.kind):
                room[column.offset_bytes : column.end_bytes] = data
        self.twin.mark(page, generation)
        return LeaseTerms(
            lease_id=f"l-{page}-{generation}",
            payload=payload,
            writer_id="publisher",
            extent=extent,
            on_device=on_device,
        )

    def pass_slab(self, slab_id: str, timeout: float) -> PassedSlab:
        """Pass it, as a line does."""
        self.passed += 1
        part = DeviceMemoryPart(memory=self.exported, size_bytes=self.size_bytes)
        return PassedSlab(
            os.dup(self.twin.fd), self.twin.total_bytes, part if self.passes_device else None
        )
