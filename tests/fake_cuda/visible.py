"""The devices that one process sees, and which of them reach one another's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tests.fake_cuda.numbers import refusal

from teacher_logits.device_memory import Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

VisibleDevice: TypeAlias = tuple[str, str, bool]
"""UUID, name, and whether it is a MIG device. Its place in the list is its ordinal."""

ONE_GPU: VisibleDevice = ("GPU-00000000-aaaa-4000-8000-000000000000", "Fake H200", False)
OTHER_GPU: VisibleDevice = ("GPU-11111111-bbbb-4000-8000-000000000001", "Fake H200", False)
MIG_GPU: VisibleDevice = ("MIG-22222222-cccc-4000-8000-000000000002", "Fake H200 MIG 1g", True)


class Visible:
    """What a process sees."""

    def __init__(
        self,
        devices: Sequence[VisibleDevice],
        *,
        no_peer_access: Iterable[tuple[str, str]],
        peer_error: int,
    ) -> None:
        self.devices = tuple(
            Device(ordinal=ordinal, uuid=uuid, name=name, is_mig=is_mig)
            for ordinal, (uuid, name, is_mig) in enumerate(devices)
        )
        self._strangers = frozenset(frozenset(pair) for pair in no_peer_access)
        self._peer_error = peer_error

    def find(self, uuid: str) -> Device | None:
        """Return the device of a UUID, if it is seen."""
        return next((device for device in self.devices if device.uuid == uuid), None)

    def check(self, call: str, device: Device) -> None:
        """Refuse (101) a device that is none of these, or has another number here."""
        if device not in self.devices:
            raise refusal(101, call, f"device {device.ordinal} ({device.uuid}) is not of here")

    def check_reach(self, uuid: str, device: Device) -> None:
        """Refuse memory of one device to another that has no way to it."""
        owner = self.find(uuid)
        if owner is None:
            raise refusal(1, "open", f"{uuid} is not visible here")
        if owner.is_mig or device.is_mig:
            raise refusal(801, "open", f"{uuid} or {device.uuid} is a MIG device")
        if uuid != device.uuid and frozenset((uuid, device.uuid)) in self._strangers:
            raise refusal(self._peer_error, "open", f"no peer access from {device.uuid} to {uuid}")
