"""Tries to register memory of this process's allocator with a publisher. It is no test.

python -m tests.gpu.registrant DRIVER ORDINAL ADDRESS expandable|pool
"""

from __future__ import annotations

import sys

import torch
from tests.gpu.allocator import is_expandable
from tests.gpu.rig import Rig
from tests.gpu.teacher import profile_of

import teacher_logits_client as tl


def main(driver: str, ordinal: str, address: str, name: str) -> None:
    """Allocate as torch does, register, and say what came of it."""
    rig = Rig.of(driver, ordinal=int(ordinal), other_pythons=())
    assert rig is not None
    storage = torch.empty(4 << 20, dtype=torch.uint8, device=rig.torch_device)
    if name == "expandable" and not is_expandable(storage.data_ptr()):
        print("torch has no expandable segments here")  # noqa: T201
        return
    with (
        tl.connect(address, device_memory=rig.memory) as client,
        client.open_publisher(
            profile_of(name, 2), device=rig.device.uuid, pool_size_bytes=1 << 22
        ) as publisher,
    ):
        try:
            publisher.register(storage)
        except tl.errors.RequestInvalidError as error:
            print(f"refused: {error.message}")  # noqa: T201
        else:
            print("registered")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
