"""The ``cuda_ipc`` transport: slabs of device memory go to readers by the driver's handle.

Nothing moves, and nothing is opened here: a publisher's handle is passed on as it came, beside the
descriptor of the slab's host twin, to sessions that have proven that they can open it. The server
needs no device for that. Slabs of its own engine's device go the same way.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from teacher_logits.transport import Transport

if TYPE_CHECKING:
    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits_server.exporters.shared_memory import PassedSlab, SharedMemoryExporter
    from teacher_logits_server.ledger import Ledger


class OwnSlabs(Protocol):
    """The server's own slabs; ``slabs.ServerSlabs``."""

    def device_part(self, slab_id: str) -> DeviceMemoryPart:
        """Return what readers of one in device memory open."""


class CudaIpcExporter:
    """Says which handle, beside which descriptor, shows a reader what it may read.

    Args:
        shared: passes the host twins, and the slabs that are all host memory.
        own: has the device parts of the server's own.
    """

    transport = Transport.CUDA_IPC

    def __init__(self, *, ledger: Ledger, shared: SharedMemoryExporter, own: OwnSlabs) -> None:
        self._ledger = ledger
        self._own = own
        self._shared = shared

    def start(self) -> None:
        """Nothing is to be started; the broker carries descriptors and handles."""

    def stop(self) -> None:
        """Nothing is to be stopped."""

    def pass_slab(self, session_id: str, slab_id: str) -> PassedSlab:
        """Return a slab for a local session, with its device part if it reads that.

        Raises:
            NotAllowedError: the session may not open it, or there is no such slab.
        """
        passed = self._shared.pass_slab(session_id, slab_id)
        try:
            return replace(passed, device=self._device_part(session_id, slab_id))
        except BaseException:
            os.close(passed.descriptor)
            raise

    def _device_part(self, session_id: str, slab_id: str) -> DeviceMemoryPart | None:
        device = self._ledger.device_part(session_id, slab_id)
        if device is None and self._ledger.passes_own_device(session_id, slab_id):
            with suppress(KeyError):  # idle, and given up in this moment
                device = self._own.device_part(slab_id)
        return device
