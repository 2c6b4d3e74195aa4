"""One process's driver as text, for a child process's command line.

Spec(folder=str(tmp_path), devices=(ONE_GPU,), faults=(Fault(call="open", error=101),)).dumps()
...
client = tl.connect(address, device_memory=Spec.loads(sys.argv[1]).memory())
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.faulty import Fault, FaultyMemory
from tests.fake_cuda.visible import ONE_GPU

if TYPE_CHECKING:
    from tests.fake_cuda.visible import VisibleDevice

    from teacher_logits.device_memory import DeviceMemory


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What ``FakeCuda`` is made with, and the faults around it."""

    folder: str
    devices: tuple[VisibleDevice, ...] = (ONE_GPU,)
    no_peer_access: tuple[tuple[str, str], ...] = ()
    peer_error: int = 217
    pid_namespace: int | None = None
    memory_bytes: int | None = None
    faults: tuple[Fault, ...] = ()

    def dumps(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Spec:
        """Read it back."""
        found = json.loads(text)
        found["devices"] = tuple((uuid, name, mig) for uuid, name, mig in found["devices"])
        found["no_peer_access"] = tuple((one, other) for one, other in found["no_peer_access"])
        found["faults"] = tuple(Fault(**fault) for fault in found["faults"])
        return cls(**found)

    def fake(self) -> FakeCuda:
        """Make the driver without its faults."""
        return FakeCuda(
            Path(self.folder),
            devices=self.devices,
            no_peer_access=self.no_peer_access,
            peer_error=self.peer_error,
            pid_namespace=self.pid_namespace,
            memory_bytes=self.memory_bytes,
        )

    def around(self, fake: FakeCuda) -> DeviceMemory:
        """Put the faults around a driver, if there are any."""
        return FaultyMemory(fake, self.faults) if self.faults else fake

    def memory(self) -> DeviceMemory:
        """Make the driver, with its faults around it if it has any."""
        return self.around(self.fake())
