"""Says what the driver takes a tensor's memory for, under this process's allocator. No test.

python -m tests.gpu.allocator DRIVER ORDINAL native|expandable|pool
"""

from __future__ import annotations

import sys

import torch
from tests.gpu.rig import Rig

from teacher_logits.device_memory import DeviceError, MemoryKind

_FAKE_KINDS = {
    "native": MemoryKind.PLAIN,
    "expandable": MemoryKind.VIRTUAL,
    "pool": MemoryKind.POOL,
}


def is_expandable(address: int) -> bool:
    """Say whether torch's allocator has an address in an expandable segment."""
    return any(
        segment["is_expandable"] and segment["address"] <= address
        for segment in torch.cuda.memory.memory_snapshot()
        if address < segment["address"] + segment["total_size"]
    )


def main(driver: str, ordinal: str, name: str) -> None:
    """Allocate, ask, and try to export."""
    rig = Rig.of(driver, ordinal=int(ordinal), other_pythons=())
    assert rig is not None
    if rig.is_fake:
        address = rig.memory.allocate(1 << 20, device=rig.device, kind=_FAKE_KINDS[name])  # type: ignore[call-arg]
    else:
        tensor = torch.empty(4 << 20, dtype=torch.uint8, device=rig.torch_device)
        address = tensor.data_ptr()
        if name == "expandable" and not is_expandable(address):
            print("torch has no expandable segments here")  # noqa: T201
            return
    kind = rig.memory.locate(address).kind
    try:
        rig.memory.export(address)
        exported = "exported"
    except DeviceError as error:
        exported = f"not exported: {error.number} {error.name}"
    print(f"{kind.name}, {exported}")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
