"""Placed columns: a payload whose columns over positions lie in its publisher's own tensors.

The tensors lie in memory that was registered, wherever their owner keeps them; the columns over
rows are put behind the last of them in the host twin's offset space (``device_slab``). So a payload
takes whole pages from its first tensor on to some hundred bytes behind its last, and those of two
payloads must not touch:

    registered memory   | .. | topk_ids | .. | topk_logprobs | .. | log_tail | .................. |
    a payload's pages     |<----------------------------------------- + rows ----->|

Refuses tensors that are not what the profile promises, with both sides' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ALIGNMENT_BYTES, Column, is_on_device, lay_out, round_up
from teacher_logits.pool import PAGE_BYTES
from teacher_logits.tensors import DTYPES
from teacher_logits_client.slabs.placed_room import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.errors import Fact


OwnColumns: TypeAlias = "Mapping[str, torch.Tensor]"
"""A publisher's own tensors, by the names of their columns."""


@dataclass(frozen=True, kw_only=True)
class Registered:
    """Memory that was registered: where it is, and the slab that it became."""

    slab_id: str
    address: int
    size_bytes: int
    #: The twin's room for extents, larger than ``size_bytes``.
    room_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlacedColumns:
    """Columns where their tensors lie, in the order of their offsets."""

    columns: tuple[Column, ...]
    size_bytes: int
    place: Place


def place_columns(
    promised: Sequence[Column], tensors: OwnColumns, buffers: Sequence[Registered]
) -> PlacedColumns:
    """Place a payload's columns where its publisher's tensors lie.

    Args:
        promised: the columns as the profile has them; their offsets do not count.
        tensors: one for each column over positions, by its name, contiguous, [P,...] or [N,S,...].

    Raises:
        PayloadInvalidError: tensors are missing or too many, of another type or shape, not
            contiguous, not all in one of ``buffers``, or start at no multiple of 256 bytes.
    """
    over_positions = {c.kind.value: c for c in promised if is_on_device(c.kind)}
    _check_kinds(tensors)
    if tensors.keys() != over_positions.keys():
        raise _invalid(
            f"columns has {_names(tensors)}, and the payload's columns over positions are "
            f"{_names(over_positions)}: give just these; the draft writes those over rows itself",
            given=_names(tensors),
            wanted=_names(over_positions),
        )
    for name, tensor in tensors.items():
        _check(name, tensor, over_positions[name])
    buffer = _buffer_of(tensors, buffers)
    starts = {name: tensor.data_ptr() - buffer.address for name, tensor in tensors.items()}
    for name, start in starts.items():
        if start % ALIGNMENT_BYTES:
            raise _invalid(
                f"column {name} begins at byte {start} of its buffer: begin each column at a "
                f"multiple of {ALIGNMENT_BYTES}",
                column=name,
                offset_bytes=start,
            )
    base = min(starts.values()) // PAGE_BYTES * PAGE_BYTES
    placed = _in_order(over_positions, starts, base)
    rows, row_bytes = lay_out(
        (c.kind, c.element_type, c.shape) for c in promised if not is_on_device(c.kind)
    )
    behind = round_up(placed[-1].end_bytes, ALIGNMENT_BYTES)
    columns = (*placed, *(_moved(column, behind) for column in rows))
    place = Place(
        slab_id=buffer.slab_id,
        offset_bytes=base,
        size_bytes=round_up(behind + row_bytes, PAGE_BYTES),
    )
    _check_room(place, buffer)
    return PlacedColumns(columns=columns, size_bytes=behind + row_bytes, place=place)


def _in_order(like: Mapping[str, Column], starts: Mapping[str, int], base: int) -> list[Column]:
    """Return columns in the order of where they start, offsets counted from ``base``."""
    placed: list[Column] = []
    for name in sorted(starts, key=lambda each: starts[each]):
        column = _moved(like[name], starts[name] - base - like[name].offset_bytes)
        if placed and column.offset_bytes < placed[-1].end_bytes:
            raise _invalid(
                f"column {name} begins at byte {starts[name]} of its buffer, inside "
                f"{placed[-1].kind.value}: give tensors that do not overlap",
                column=name,
            )
        placed.append(column)
    return placed


def _check_kinds(given: object) -> None:
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise _invalid(
            f"columns is a {kind}: give a mapping of columns' names to tensors", given=kind
        )
    for name, tensor in given.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise _invalid(
                f"columns has a {kind} under {name!r}: give a torch.Tensor under a column's name",
                column=str(name),
                given=kind,
            )


def _check(name: str, tensor: torch.Tensor, column: Column) -> None:
    dtype = DTYPES[column.element_type]
    shape = tuple(tensor.shape)
    axes = len(column.shape) - 1
    lead = shape[: len(shape) - axes]
    fits = (
        shape[len(shape) - axes :] == column.shape[1:]
        and len(lead) in (1, 2)
        and tensor.numel() == column.size_bytes // column.element_type.size_bytes
    )
    if tensor.dtype != dtype or not fits or not tensor.is_contiguous():
        state = "" if tensor.is_contiguous() else ", not contiguous"
        raise _invalid(
            f"column {name} is {str(tensor.dtype).removeprefix('torch.')} {shape}{state}, and the "
            f"payload has {column.element_type.value} {column.shape}: give a contiguous tensor of "
            f"just that, as [P,...]{_way(lead, column.shape[0])}",
            column=name,
            shape=str(shape),
            wanted=str(column.shape),
        )


def _way(lead: tuple[int, ...], positions: int) -> str:
    """Say which other shape will do, or that padding is none."""
    if len(lead) != 2 or lead[0] * lead[1] <= positions:
        return " or [N,S,...] without padding"
    return (
        f"; {lead[0]} rows of {lead[1]} are {lead[0] * lead[1]} positions, and the payload has "
        f"{positions}: padding has no place here, give each row's true positions behind the last's"
    )


def _buffer_of(tensors: OwnColumns, buffers: Sequence[Registered]) -> Registered:
    for buffer in buffers:
        end = buffer.address + buffer.size_bytes
        if all(
            buffer.address <= t.data_ptr() and t.data_ptr() + t.nbytes <= end
            for t in tensors.values()
        ):
            return buffer
    raise _invalid(
        f"the tensors do not all lie in one of the {len(buffers)} buffers that were registered: "
        "register the buffer that they are views of, once, with publisher.register(buffer)",
        buffers=len(buffers),
    )


def _check_room(place: Place, buffer: Registered) -> None:
    end = place.offset_bytes + place.size_bytes
    if end > buffer.room_bytes:
        raise _invalid(
            f"the payload takes bytes {place.offset_bytes} to {end} of its buffer, columns over "
            f"rows included, and the buffer's slab ends at {buffer.room_bytes}: leave "
            f"{end - buffer.room_bytes} bytes more behind its last tensor",
            end_bytes=end,
            room_bytes=buffer.room_bytes,
        )


def _moved(column: Column, by_bytes: int) -> Column:
    return Column(
        kind=column.kind,
        element_type=column.element_type,
        shape=column.shape,
        offset_bytes=column.offset_bytes + by_bytes,
    )


def _names(columns: Mapping[str, object]) -> str:
    return ", ".join(sorted(columns)) or "none"


def _invalid(message: str, **facts: Fact) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts=facts)
