"""Bins: which rows share a packed micro batch, where sequences are packed.

The packing is modified first fit decreasing (Johnson and Garey, "A 71/60 theorem for bin
packing", 1985), with the ties as NeMo RL breaks them, so that both sides of its hand-over come to
one plan. Sizes are against the capacity C:

    large  (C/2, C]    a bin each, in decreasing order
    medium (C/3, C/2]  front to back: the largest that fits goes beside a large one
    small  (C/6, C/3]  back to front: the smallest and the largest that fits with it go beside a
                       large one that has no medium one
    any                front to back: the largest that still fit, into the bins so far
    rest               into new bins, each row into the emptiest one; those bins stand in
                       increasing order of what is in them, in the order in which they came to it

Pure: numbers in, numbers out. Refuses a row that is longer than a bin, and a number of bins that
the rows cannot give.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from teacher_logits.errors import GridMismatchError, Violation

if TYPE_CHECKING:
    from collections.abc import Sequence


def pack_rows(sizes: Sequence[int], *, capacity: int, multiple_of: int = 1) -> list[list[int]]:
    """Return the bins, each the places of its rows in ``sizes``, as many as a multiple of a number.

    Where bins are missing to that multiple, the fullest by count (of equals the last) gives its
    last rows away, one a bin, until one is left in it; then the next.

    Raises:
        GridMismatchError: ``row_too_long``, or ``too_few_rows`` for that many bins.
    """
    for place, size in enumerate(sizes):
        if size > capacity:
            raise GridMismatchError([_too_long(place, size, capacity)])
    falling = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    bins, rest = _around_large(falling, sizes, capacity)
    bins += _in_the_emptiest(rest, sizes, capacity)
    missing = -len(bins) % multiple_of
    if len(bins) + missing > len(sizes):
        raise GridMismatchError([_too_few(len(sizes), len(bins) + missing)])
    for place in sorted(range(len(bins)), key=lambda at: (len(bins[at]), at), reverse=True):
        while missing and len(bins[place]) > 1:
            bins.append([bins[place].pop()])
            missing -= 1
    return bins


def _around_large(
    falling: list[int], sizes: Sequence[int], capacity: int
) -> tuple[list[list[int]], list[int]]:
    """Return a bin for each large row with what goes beside it, and the rows left, falling."""
    bins = [[row] for row in falling if 2 * sizes[row] > capacity]
    room = [capacity - sizes[row] for (row,) in bins]
    rest = falling[len(bins) :]
    for at in range(len(bins)):
        medium = [row for row in rest if capacity < 3 * sizes[row] and sizes[row] <= room[at]]
        for row in medium[:1]:
            _move(row, rest, bins[at])
            room[at] -= sizes[row]
    for at in reversed(range(len(bins))):
        pair = _small_pair(rest, sizes, capacity, room[at]) if len(bins[at]) == 1 else ()
        for row in pair:
            _move(row, rest, bins[at])
            room[at] -= sizes[row]
    for at in range(len(bins)):
        for row in list(rest):
            if sizes[row] <= room[at]:
                _move(row, rest, bins[at])
                room[at] -= sizes[row]
    return bins, rest


def _small_pair(rest: list[int], sizes: Sequence[int], capacity: int, room: int) -> tuple[int, ...]:
    """Return the smallest of the small rows and the largest that fits with it, or nothing.

    Of equals the first of the batch is the smallest; of equals it is the last that fits.
    """
    small = [row for row in rest if capacity < 6 * sizes[row] and 3 * sizes[row] <= capacity]
    rising = sorted(small, key=lambda row: (sizes[row], row))
    fitting = [row for row in rising[1:] if sizes[row] + sizes[rising[0]] <= room]
    return (rising[0], fitting[-1]) if fitting else ()


def _in_the_emptiest(rest: list[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    filled: list[int] = []  # beside `bins`, rising
    for row in rest:
        fits = bool(bins) and filled[0] + sizes[row] <= capacity
        into, before = (bins.pop(0), filled.pop(0)) if fits else ([], 0)
        after = before + sizes[row]
        at = bisect.bisect_right(filled, after)
        filled.insert(at, after)
        bins.insert(at, [*into, row])
    return bins


def _move(row: int, rest: list[int], into: list[int]) -> None:
    rest.remove(row)
    into.append(row)


def _too_long(place: int, size: int, capacity: int) -> Violation:
    message = f"row {place} takes {size} tokens and a micro batch {capacity}: give more tokens"
    facts = {"row": place, "tokens": size, "max_tokens_per_micro_batch": capacity}
    return Violation(rule="row_too_long", message=message, facts=facts)


def _too_few(rows: int, bins: int) -> Violation:
    message = f"{rows} rows do not make {bins} micro batches, of which none is empty"
    return Violation(rule="too_few_rows", message=message, facts={"rows": rows, "bins": bins})
