"""The probe of a writer with device memory: readers prove by it that they can open what it has.

A probe is a small allocation of its own with 32 bytes that only a process which really shares the
device's memory can read: a reader opens it once at its handshake, before any payload. It is
exported for as long as its writer lives.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from teacher_logits.device_memory import PROBE_BYTES, DeviceError

if TYPE_CHECKING:
    from teacher_logits.device_memory import Device, DeviceMemory, ExportedMemory


class Probe:
    """A writer's probe. It owns its memory until ``close``."""

    def __init__(self, memory: DeviceMemory, device: Device) -> None:
        """Allocate, write the challenge, and export.

        Raises:
            DeviceError: the driver refuses.
        """
        self.memory = memory
        self.device = device
        self.challenge = secrets.token_bytes(PROBE_BYTES)
        self._address = memory.allocate(PROBE_BYTES, device=device)
        try:
            memory.copy_to_device(self._address, memoryview(self.challenge), device=device)
            self.exported: ExportedMemory = memory.export(self._address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back; twice is fine. Readers have it open for a moment only."""
        address, self._address = self._address, 0
        if address:
            with suppress(DeviceError):  # the process is about to end, or the driver is gone
                self.memory.free(address, device=self.device)
