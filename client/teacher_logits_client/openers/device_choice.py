"""The choice of a device: from what a user writes to a driver and one of its devices.

A driver is looked for only when somebody names a device: whoever uses none pays for none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from teacher_logits.device_memory import device_names, find_device
from teacher_logits.errors import ConfigError
from teacher_logits.grid import is_whole

if TYPE_CHECKING:
    import torch

    from teacher_logits.device_memory import Device, DeviceMemory
    from teacher_logits_client.openers.devices import Devices

DeviceName: TypeAlias = "torch.device | str | int"
"""``"cuda"``, ``"cuda:1"``, an ordinal, or a UUID as ``nvidia-smi -L`` prints it."""


def choose_device(given: DeviceName, drivers: Devices) -> tuple[DeviceMemory, Device]:
    """Return the driver and the device that ``given`` names.

    Args:
        given: ``cuda`` alone is the first device.
        drivers: the client's driver, which is looked for here.

    Raises:
        ConfigError: there is no driver, or no such device, with those that there are.
        DeviceError: the driver refuses to say.
    """
    driver = drivers.find()
    if driver is None:
        raise ConfigError(
            f"device {str(given)!r} was asked for, and this machine has no CUDA driver: leave the "
            "device out to keep payloads on the host",
            facts={"device": str(given)},
        )
    devices = driver.devices()
    found = None if isinstance(given, bool) else find_device(str(given), devices)
    if found is not None:
        return driver, found
    has = device_names(devices)
    kind = "" if is_whole(given) or isinstance(given, str) else f", a {type(given).__name__}"
    way = "or look at CUDA_VISIBLE_DEVICES"
    if str(given) == "cpu":
        kind, way = "", "or none: host memory is used where device= is left out"
    raise ConfigError(
        f"device {str(given)!r}{kind} is none that this process sees ({has}): name one of these, "
        f"{way}",
        facts={"device": str(given), "devices": has},
    )
