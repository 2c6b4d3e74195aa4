"""A device that is none: tensors that claim to be elsewhere, whose work is done on the CPU.

Torch lets nobody mix tensors of two devices in one operation, apart from scalars. On a machine
without a device nothing shows such a mix, since all tensors are on the CPU. Inside ``elsewhere()``
it is an error here as it is there:

    with elsewhere() as there:
        ids = there(torch.tensor([1, 2]))     # ids.device is not the CPU
        ids + torch.tensor([1, 2])            # TwoDevices
        ids.to("cpu") + torch.tensor([1, 2])  # fine

``copied`` counts the elements that came from elsewhere to the CPU.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from collections.abc import Iterator

ELSEWHERE = torch.device("meta")
"""The name that torch knows the device by; no tensor of ours is really without data."""

_MOVES = frozenset({"aten::_to_copy", "aten::copy_"})


class TwoDevices(Exception):
    """One operation was given tensors of two devices."""


class _There(torch.Tensor):
    """A tensor whose data is in ``here``, on the CPU."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> _There:
        made: _There = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), dtype=here.dtype, device=ELSEWHERE
        )
        made.here = here
        return made

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"elsewhere({self.here!r})"

    def tolist(self) -> Any:
        return self.here.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        raise AssertionError("outside of elsewhere()")


class Elsewhere(TorchDispatchMode):
    """Runs what concerns tensors from elsewhere, and refuses what mixes them with others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that claims to be elsewhere."""
        return _There(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        there = any(isinstance(each, _There) for each in given)
        name = func._schema.name
        to = kwargs.get("device")
        if there and name not in _MOVES:
            strangers = [each for each in given if not isinstance(each, _There) and each.dim()]
            if strangers:
                shapes = [tuple(each.shape) for each in strangers]
                raise TwoDevices(f"{name}: tensors of the CPU {shapes} beside those from elsewhere")
        if to is not None:
            if name == "aten::_to_copy" and there and torch.device(to) != ELSEWHERE:
                self.copied += sum(each.numel() for each in given)
            there = torch.device(to) == ELSEWHERE
            kwargs["device"] = torch.device("cpu")
        elif name == "aten::copy_":
            there = isinstance(args[0], _There)
        args, kwargs = tree_map(_here, (args, kwargs))
        out = func(*args, **kwargs)
        if name.endswith("_") and there and given:  # in place: the very tensor comes back
            return given[0]
        return tree_map(_there, out) if there else out


def _here(value: object) -> object:
    return value.here if isinstance(value, _There) else value


def _there(value: object) -> object:
    return _There(value) if isinstance(value, torch.Tensor) else value


@contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    """Have a device in the block."""
    mode = Elsewhere()
    with mode:
        yield mode
