"""The engine's device: where its payloads lie for students that read device memory.

Promises: nothing of CUDA is touched where ``--device-pool-size`` is not given. Where it is, a
device without that much room beside the teacher is refused when the server starts, by a trial
allocation of all of it; one that fills up later shows as ``PoolFullError``, and kills nobody.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from teacher_logits.device_memory import DeviceError, DeviceProbe, device_names, find_device
from teacher_logits.devices.probe import probe_of
from teacher_logits.devices.slab import DeviceSlab
from teacher_logits.devices.slabs import DeviceSlabs
from teacher_logits.errors import ConfigError
from teacher_logits_server.readers import size_setting
from teacher_logits_server.settlement.device_offers import DeviceOffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.device_memory import Device, DeviceMemory
    from teacher_logits_server.config import ServerConfig

_FLAG = "--device-pool-size"


class EngineDevice:
    """One device: it makes the slabs there, and has the probe that is shown to readers.

    Args:
        budget_bytes: what all slabs together may come to.
    """

    def __init__(self, memory: DeviceMemory, device: Device, *, budget_bytes: int) -> None:
        """Try whether there is room, and write the probe.

        Raises:
            ConfigError: there is not, or the driver hands nothing of this device over.
        """
        self.device = device
        self._memory = memory
        self._slabs = DeviceSlabs(
            self._new,
            device=device,
            budget_bytes=budget_bytes,
            budget_name=_FLAG,
            way_out=f"give the teacher less, or lower {_FLAG} or --slab-size",
        )
        try:
            memory.free(memory.allocate(budget_bytes, device=device), device=device)
            self._probe = probe_of(memory, device)
        except DeviceError as error:
            raise ConfigError(
                f"{_FLAG} {budget_bytes}: device {device.uuid} ({device.name}) gave no such memory "
                f"beside the teacher ({error.message}): lower it, or choose another --device",
                facts={
                    **error.facts,
                    "flag": _FLAG,
                    "need_bytes": budget_bytes,
                    "device_uuid": device.uuid,
                },
            ) from error

    @property
    def offer(self) -> DeviceOffer:
        """What readers open on trial."""
        probe = DeviceProbe(
            writer_id="",
            memory=self._probe.exported,
            pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
            host=socket.gethostname(),
        )
        return DeviceOffer(probe=probe, challenge=self._probe.challenge)

    def make(self, slab_id: str, usual_bytes: int, least_bytes: int) -> DeviceSlab:
        """Return a new slab of the usual size, or with just enough room. On any thread.

        Raises:
            PoolFullError: see ``DeviceSlabs.make``.
        """
        return self._slabs.make(slab_id, usual_bytes, least_bytes)

    def on_freed(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when readers have let go of memory; see ``DeviceSlabs``."""
        self._slabs.on_freed(callback)

    def _new(self, slab_id: str, size_bytes: int, when_freed: Callable[[], None]) -> DeviceSlab:
        return DeviceSlab(
            slab_id, size_bytes, memory=self._memory, device=self.device, when_freed=when_freed
        )


def engine_device(config: ServerConfig, memory: DeviceMemory | None) -> EngineDevice | None:
    """Return the device that a server was told to write to; None where it was not.

    Args:
        memory: the driver; the machine's own where None.

    Raises:
        ConfigError: there is no driver, no such device, or no room there.
    """
    size = config.device_pool_size_bytes
    if not size:
        return None
    driver = memory if memory is not None else _find()
    if driver is None:
        raise _refuse(size, "is memory of a GPU, and this machine has no CUDA driver: leave it out")
    name = "cuda" if config.device == "auto" else config.device
    try:
        devices = driver.devices()
    except DeviceError as error:
        raise _refuse(size, f"the driver says of its devices: {error.message}") from error
    device = find_device(name, devices)
    if device is None:
        has = device_names(devices)
        raise _refuse(
            size, f"--device {config.device} is none that this process sees ({has}): name one"
        )
    return EngineDevice(driver, device, budget_bytes=size)


def _refuse(size_bytes: int, why: str) -> ConfigError:
    return ConfigError(
        f"{_FLAG} {size_setting(size_bytes)}: {why}", facts={"flag": _FLAG, "value": size_bytes}
    )


def _find() -> DeviceMemory | None:
    from teacher_logits.cuda_memory import find_driver  # loads a driver's libraries

    return find_driver()
