"""Flat payloads: a payload's tensors in one run of bytes, which Ray carries beside its pickle.

Ray copies a torch tensor into the pickle's own bytes and out of them; a NumPy array goes out of
band: one copy into the object store, and none out of it. So a payload's columns lie in one array
of bytes, and its reader gets tensors that view the store. bf16, which NumPy has not, comes
through as any other type.

Promises: a tensor, wherever it lies, is copied once, straight to its place. Views of the store
are *shared*: NumPy marks the bytes read-only, torch cannot, so who writes into such a tensor in
place writes into every reader's. ``copies`` gives tensors of one's own, and ``copy_into`` fills
those one has. Refuses ids that a packed type does not hold.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.tensors import DTYPES, ELEMENT_TYPES
from teacher_logits_client.ray.descriptions import (
    ID_TYPES,
    INDICES,
    LOGITS,
    VALUE_TYPES,
    FlatColumn,
    PayloadDescription,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from teacher_logits.layout import ElementType

    Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatPayload:
    """A payload as it lies in Ray's object store: its description, and its bytes."""

    description: PayloadDescription
    buffer: Bytes

    def views(self) -> dict[str, torch.Tensor]:
        """Return every column as a tensor over these bytes; they are kept while one is there.

        Not to be written into: see the module.

        Raises:
            PayloadInvalidError: the bytes end before a column does.
        """
        return column_views(self.buffer, self.description.columns)

    def copies(self) -> dict[str, torch.Tensor]:
        """Return every column as a tensor of the caller's own."""
        return {name: view.clone() for name, view in self.views().items()}

    def copy_into(self, out: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy every column into the caller's tensors of its shape, of any type and device.

        Raises:
            PayloadInvalidError: ``out`` lacks a column, or has it in another shape, or in a type
                that does not hold its ids or values, or cannot be written into.
        """
        views = self.views()
        for name, view in views.items():
            _check_out(name, out.get(name), view)
            if name == INDICES:
                check_holds_ids(out[name].dtype, self.description.id_range, view)
            else:
                check_holds_values(out[name].dtype, view)
        for name, view in views.items():
            out[name].copy_(view)
        return {name: out[name] for name in views}


def _check_out(name: str, given: object, view: torch.Tensor) -> None:
    """Let a tensor of the caller's pass that a column can be copied into."""
    is_tensor = isinstance(given, torch.Tensor) and not given.is_nested
    shape = tuple(given.shape) if isinstance(given, torch.Tensor) and is_tensor else ()
    why = ""
    if not isinstance(given, torch.Tensor) or shape != tuple(view.shape):
        why = str(shape) if is_tensor else f"a {type(given).__name__}"
    elif given.requires_grad and torch.is_grad_enabled():
        why = "one that requires a gradient"
    elif any(step == 0 and size > 1 for size, step in zip(shape, given.stride(), strict=True)):
        why = "expanded, and has less memory than entries"
    if why:
        raise PayloadInvalidError(
            f"out[{name!r}] is {why}: give memory of shape {tuple(view.shape)}",
            facts={"name": name, "wanted": str(tuple(view.shape)), "has": why},
        )


def column_views(buffer: Bytes, columns: Sequence[FlatColumn]) -> dict[str, torch.Tensor]:
    """Return a tensor over each column's place in ``buffer``, which starts at the payload's.

    Raises:
        PayloadInvalidError: the buffer ends before a column does.
    """
    ends = max((each.end_bytes for each in columns), default=0)
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or buffer.nbytes < ends:
        raise PayloadInvalidError(
            f"a payload of {ends} bytes was given as {buffer.nbytes} bytes of {buffer.dtype}",
            facts={"size_bytes": ends, "given_bytes": buffer.nbytes},
        )
    # Only where it is needed: the filters are those of the whole process, for all its threads.
    with contextlib.nullcontext() if buffer.flags.writeable else warnings.catch_warnings():
        if not buffer.flags.writeable:  # which is the reader's to know: see the module
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(buffer)
    return {
        each.name: flat[each.offset_bytes : each.end_bytes]
        .view(DTYPES[each.element_type])
        .view(each.shape)
        for each in columns
    }


def top_k_specs(
    tensors: Mapping[str, torch.Tensor],
    *,
    value_type: ElementType | None = None,
    id_type: ElementType | None = None,
) -> list[tuple[str, ElementType, tuple[int, ...]]]:
    """Return name, type and shape of a payload's columns; a given type stands for the tensor's own.

    Raises:
        PayloadInvalidError: they are not one tensor of values and one of ids, [N,S,K] both, of
            types that a payload has.
    """
    if not isinstance(tensors, Mapping) or set(tensors) != {LOGITS, INDICES}:
        told = str(list(tensors)) if isinstance(tensors, Mapping) else type(tensors).__name__
        raise PayloadInvalidError(
            f"give a mapping of {LOGITS} and {INDICES}, not {told}", facts={"given": told}
        )
    for name, each in tensors.items():
        is_dense = isinstance(each, torch.Tensor) and not (
            each.is_nested or each.layout is not torch.strided or each.is_meta
        )
        if not is_dense:
            raise PayloadInvalidError(
                f"{name} is no dense tensor but a {type(each).__name__}: give it padded, [N,S,K]",
                facts={"name": name, "type": type(each).__name__},
            )
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    if len(set(shapes.values())) > 1 or len(shapes[LOGITS]) != 3 or not math.prod(shapes[LOGITS]):
        raise PayloadInvalidError(
            f"{LOGITS} has shape {shapes[LOGITS]} and {INDICES} {shapes[INDICES]}: give both as "
            "[N,S,K], none of them 0",
            facts={name: str(shape) for name, shape in shapes.items()},
        )
    specs = []
    for name, given, allowed in ((LOGITS, value_type, VALUE_TYPES), (INDICES, id_type, ID_TYPES)):
        dtype = tensors[name].dtype
        check_type(name, ELEMENT_TYPES.get(dtype), allowed, said=str(dtype))
        specs.append((name, check_type(name, given or ELEMENT_TYPES[dtype], allowed), shapes[name]))
    return specs


def check_type(
    name: str, element_type: ElementType | None, allowed: Sequence[ElementType], *, said: str = ""
) -> ElementType:
    """Return a column's element type if payloads have it; ``said`` is what messages call it.

    Raises:
        PayloadInvalidError: they have not.
    """
    if element_type is None or element_type not in allowed:
        said = said or str(element_type)
        raise PayloadInvalidError(
            f"{name} is of {said}: use one of {[each.value for each in allowed]}",
            facts={"name": name, "type": said},
        )
    return element_type


def check_top_k(
    tensors: Mapping[str, torch.Tensor], *, vocabulary_size: int | None = None
) -> tuple[int, int]:
    """Look at every value and id once, where they lie; return the least and the greatest id.

    Raises:
        PayloadInvalidError: a value is NaN or +inf, or an id is none of the vocabulary.
    """
    least, most = (float(each) for each in tensors[LOGITS].detach().aminmax())
    if math.isnan(least) or most == math.inf:
        raise PayloadInvalidError(
            f"{LOGITS} has a value that is {'NaN' if math.isnan(least) else '+inf'}: a loss would "
            "spread it over the whole step",
            facts={"least": least, "greatest": most},
        )
    first, last = (int(each) for each in tensors[INDICES].aminmax())
    if first < 0 or (vocabulary_size is not None and last >= vocabulary_size):
        raise PayloadInvalidError(
            f"{INDICES} has ids from {first} to {last}: they go from 0 on, below "
            f"{vocabulary_size or 'the size of the vocabulary'}",
            facts={"least_id": first, "greatest_id": last,
                   "vocabulary_size": vocabulary_size or "unknown"},
        )  # fmt: skip
    return first, last


def check_holds_ids(
    dtype: torch.dtype, id_range: tuple[int, int] | None, ids: torch.Tensor
) -> None:
    """Let a type pass that holds every id.

    Raises:
        PayloadInvalidError: it holds only smaller ones, or no whole numbers.
    """
    if dtype is torch.int64 or dtype is ids.dtype:
        return
    most = id_range[1] if id_range is not None else int(ids.max())
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
    if not is_whole or most > torch.iinfo(dtype).max:
        raise PayloadInvalidError(
            f"ids up to {most} do not fit in {dtype}: leave them as {ids.dtype}",
            facts={"greatest_id": most, "type": str(dtype)},
        )


def check_holds_values(dtype: torch.dtype, values: torch.Tensor) -> None:
    """Let a type pass in which no value becomes +inf; what becomes -inf has no mass either way.

    Raises:
        PayloadInvalidError: it holds only smaller ones, or no real numbers.
    """
    if dtype.is_floating_point and torch.finfo(dtype).max >= torch.finfo(values.dtype).max:
        return
    most = float(values.detach().max())
    if not dtype.is_floating_point or most > torch.finfo(dtype).max:
        raise PayloadInvalidError(
            f"values up to {most:g} do not fit in {dtype}: leave them as {values.dtype}",
            facts={"greatest": most, "type": str(dtype)},
        )
