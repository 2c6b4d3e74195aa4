"""Runs: which bytes of a slab a payload takes, in memory of the host and of the device.

Pure. A payload in a host slab takes its whole extent. One in a slab of device memory takes what its
columns do, each where it lies: columns over positions on the device, and in the slab besides where
there are host copies, those over rows in the slab (``layout.is_on_device``). So extents of memory
that its owner registered may lie within one another, as long as no two columns do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from teacher_logits.layout import is_on_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from teacher_logits.payload import Extent, Payload


class Run(NamedTuple):
    """Bytes of a slab, counted from its first extent's first byte; ``stop`` is none of them."""

    on_device: bool
    start: int
    stop: int


def whole(extent: Extent) -> tuple[Run, ...]:
    """Return what a payload takes in a host slab."""
    end = extent.offset_bytes + extent.size_bytes
    return (Run(on_device=False, start=extent.offset_bytes, stop=end),)


def runs_of(extent: Extent, payload: Payload, *, host_copy: bool) -> tuple[Run, ...]:
    """Return what a payload takes in a slab of device memory."""
    runs = []
    for column in payload.columns:
        start, stop = (extent.offset_bytes + at for at in (column.offset_bytes, column.end_bytes))
        if start == stop:
            continue
        if is_on_device(column.kind):
            runs.append(Run(on_device=True, start=start, stop=stop))
        if host_copy or not is_on_device(column.kind):
            runs.append(Run(on_device=False, start=start, stop=stop))
    return tuple(runs)


def device_bytes(runs: Iterable[Run]) -> int:
    """Return how many bytes on the device they are."""
    return sum(run.stop - run.start for run in runs if run.on_device)


def device_end(runs: Iterable[Run]) -> int:
    """Return the first byte on the device behind all of them."""
    return max((run.stop for run in runs if run.on_device), default=0)


def touch(some: Iterable[Run], others: Iterable[Run]) -> bool:
    """Say whether any two of them share a byte."""
    others = tuple(others)
    return any(
        one.on_device == other.on_device and one.start < other.stop and other.start < one.stop
        for one in some
        for other in others
    )
