"""Exporters: one for each transport, on the writer's side.

An exporter says how a payload's room reaches a reader: by an entry in a table of this
process (``local``), a handle (``cuda_ipc``), a descriptor (``shared_memory``) or bytes
(``stream``). What is read, by whom and for how long is the ledger's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from teacher_logits.payload import Extent
    from teacher_logits.slab import WriterSlab
    from teacher_logits.transport import Transport
    from teacher_logits_server.exporters.shared_memory import PassedSlab


class Slabs(Protocol):
    """Where exporters find the server's memory; ``slabs.ServerSlabs`` is it."""

    def find(self, slab_id: str) -> WriterSlab:
        """Return a slab; raises KeyError where there is none (any more)."""

    def room(self, extent: Extent) -> memoryview:
        """Return an extent's bytes."""


class Exporter(Protocol):
    """One transport of the server."""

    @property
    def transport(self) -> Transport:
        """Which one it is."""

    def start(self) -> None:
        """Take readers from now on."""

    def stop(self) -> None:
        """Take no more readers. Doing so twice is fine."""


class SlabExporter(Exporter, Protocol):
    """One that passes slabs over broker lines."""

    def pass_slab(self, session_id: str, slab_id: str) -> PassedSlab:
        """Return a slab for a local session; refuses what it may not open."""
