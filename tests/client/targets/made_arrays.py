"""What arrays operations make: for tests that count them."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Sizes(TorchDispatchMode):
    """Keeps the storages that operations make anew, so that no two share an address."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = [each.untyped_storage().data_ptr() for each in known]
        self.made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.made.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        for known in self.known:
            self.made.pop(known, None)
        return out

    def larger_than(self, elements: float) -> list[int]:
        sizes = (t.untyped_storage().nbytes() // t.element_size() for t in self.made.values())
        return [size for size in sizes if size > elements]
