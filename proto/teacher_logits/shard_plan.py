"""The shard plan: which piece of which shard goes where in a reader's slice.

A shard of a tensor- and context-parallel teacher is a box of rows, positions and ids. What a
reader wants is one too: its rows, all positions or those of its own context-parallel rank, all
ids or those of its own tensor-parallel rank.

    positions   0 1 2 3 4 5 6 7
    shard 0     a b         c d        held as a b c d: its runs one behind the other (zigzag)
    shard 1         e f g h
    slice       a b e f g h c d        three pieces, each one run there and one run here

Pure. Promises: the pieces of a plan tile the slice exactly once, so that a shard that is missing is
an error, never zeros, and one that is there twice is no coin's toss. A slice that is one run of
one shard is a view of it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise, product
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadConflictError, PayloadInvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from teacher_logits.errors import Fact


@dataclass(frozen=True, kw_only=True)
class ShardBox:
    """Some ids at some positions of some rows, as a shard holds them or a reader wants them.

    ``rows`` and ``ids`` are one run each. ``positions`` are runs, in the order in which they lie
    there one behind the other. ``name`` is what messages call it.
    """

    rows: range
    positions: tuple[range, ...]
    ids: range
    name: str = "a shard"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of one shard, and where it stands in the slice; each range counts from its start.

    ``shard`` is the shard's place among those that were given.
    """

    shard: int
    source_rows: range
    source_positions: range
    source_ids: range
    rows: range
    positions: range
    ids: range


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The pieces of one slice, in the order of the shards. ``size`` counts rows, positions, ids."""

    pieces: tuple[Piece, ...]
    size: tuple[int, int, int]

    @property
    def is_view(self) -> bool:
        """Whether one piece is the slice, so that nothing has to be copied."""
        return len(self.pieces) == 1


def plan_shards(shards: Sequence[ShardBox], wanted: ShardBox) -> ShardPlan:
    """Return how ``wanted`` is put together from ``shards``.

    Shards that hold nothing of it take no part. Runs that lie one behind the other there and
    here are one piece.

    Raises:
        PayloadInvalidError: some of it is in no shard, with the rows, positions and ids; or a box
            is none: runs that are not of step 1, negative, or hold a position twice.
        PayloadConflictError: two shards hold the same of it.
    """
    for box in (*shards, wanted):
        _check_box(box)
    pieces = [piece for at, box in enumerate(shards) for piece in _pieces(at, box, wanted)]
    size = (len(wanted.rows), sum(map(len, wanted.positions)), len(wanted.ids))
    _check_tiled(pieces, size, shards, wanted)
    return ShardPlan(pieces=tuple(pieces), size=size)


def _pieces(at: int, box: ShardBox, wanted: ShardBox) -> Iterator[Piece]:
    """Yield what a shard has of the slice, runs that go on there and here taken together."""
    rows, ids = _common(box.rows, wanted.rows), _common(box.ids, wanted.ids)
    if not rows or not ids:
        return
    found: Piece | None = None
    for source, target in _runs(box.positions, wanted.positions):
        if found is not None and _goes_on(found, source, target):
            found = replace(
                found,
                source_positions=range(found.source_positions.start, source.stop),
                positions=range(found.positions.start, target.stop),
            )
            continue
        if found is not None:
            yield found
        found = Piece(
            shard=at,
            source_rows=_from(box.rows, rows),
            source_positions=source,
            source_ids=_from(box.ids, ids),
            rows=_from(wanted.rows, rows),
            positions=target,
            ids=_from(wanted.ids, ids),
        )
    if found is not None:
        yield found


def _goes_on(piece: Piece, source: range, target: range) -> bool:
    return piece.source_positions.stop == source.start and piece.positions.stop == target.start


def _runs(held: Sequence[range], wanted: Sequence[range]) -> Iterator[tuple[range, range]]:
    """Yield where positions that both have stand there and here, counted over all runs."""
    mine = sorted(
        (run.start, run.stop, at) for run, at in zip(wanted, _starts(wanted), strict=True) if run
    )
    stops = [stop for _, stop, _ in mine]
    for run, start in zip(held, _starts(held), strict=True):
        if not run:
            continue
        for first, stop, at in islice(mine, bisect_right(stops, run.start), None):
            if first >= run.stop:
                break
            both = range(max(run.start, first), min(run.stop, stop))
            yield _shifted(both, start - run.start), _shifted(both, at - first)


def _starts(runs: Sequence[range]) -> list[int]:
    return [0, *accumulate(map(len, runs))][: len(runs)]


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _from(whole: range, part: range) -> range:
    return _shifted(part, -whole.start)


def _shifted(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)


def _check_box(box: ShardBox) -> None:
    if not isinstance(box, ShardBox) or not isinstance(box.positions, tuple | list):
        raise PayloadInvalidError(
            f"{box!r} is no box of a shard: give a ShardBox, its positions as a tuple of runs",
            facts={"given": type(box).__name__},
        )
    axes = {"rows": (box.rows,), "positions": box.positions, "ids": (box.ids,)}
    for axis, runs in axes.items():
        for run in runs:
            if not isinstance(run, range) or run.step != 1 or run.start < 0 or run.stop < run.start:
                raise PayloadInvalidError(
                    f"{box.name} has {axis} {run}: give runs of step 1, from 0 or later",
                    facts={"shard": box.name, "axis": axis, "run": str(run)},
                )
    in_order = sorted(filter(len, box.positions), key=lambda run: (run.start, run.stop))
    for one, other in pairwise(in_order):  # an empty one between them would hide that they overlap
        both = _common(one, other)
        if both:
            raise PayloadInvalidError(
                f"{box.name} has positions {_text(both)} in two of its runs: each position has "
                "one place",
                facts={"shard": box.name, "first": both.start, "stop": both.stop},
            )


def _check_tiled(
    pieces: Sequence[Piece],
    size: tuple[int, int, int],
    shards: Sequence[ShardBox],
    wanted: ShardBox,
) -> None:
    """Refuse pieces that do not cover each cell of the slice once.

    A cell lies between neighbouring borders of the pieces, so that each holds all of it or none.
    """
    if len(pieces) == 1 and _size_of(pieces[0]) == size:
        return
    holders: dict[tuple[int, ...], int] = {}
    borders = [_borders(pieces, axis, length) for axis, length in enumerate(size)]
    borders[1] = sorted({*borders[1], *_starts(wanted.positions)})  # so that a cell is one run
    places = [{border: at for at, border in enumerate(axis)} for axis in borders]
    for piece in pieces:
        spans = [
            range(place[run.start], place[run.stop])
            for place, run in zip(places, _target(piece), strict=True)
        ]
        for cell in product(*spans):
            before = holders.setdefault(cell, piece.shard)
            if before != piece.shard:
                raise _twice(_cell(borders, cell), wanted, shards[before], shards[piece.shard])
    for cell in product(*(range(len(axis) - 1) for axis in borders)):
        if cell not in holders:
            raise _missing(_cell(borders, cell), wanted, len(shards))


def _borders(pieces: Sequence[Piece], axis: int, length: int) -> list[int]:
    runs = [_target(piece)[axis] for piece in pieces]
    return sorted({0, length, *(run.start for run in runs), *(run.stop for run in runs)})


def _target(piece: Piece) -> tuple[range, range, range]:
    return (piece.rows, piece.positions, piece.ids)


def _size_of(piece: Piece) -> tuple[int, int, int]:
    rows, positions, ids = _target(piece)
    return (len(rows), len(positions), len(ids))


def _cell(borders: Sequence[Sequence[int]], cell: Iterable[int]) -> tuple[range, ...]:
    return tuple(range(axis[at], axis[at + 1]) for axis, at in zip(borders, cell, strict=True))


def _named(cell: tuple[range, ...], wanted: ShardBox) -> tuple[str, dict[str, Fact]]:
    """Return a cell of the slice by the numbers that its rows, positions and ids really have."""
    rows, positions, ids = cell
    start = next(
        run.start + positions.start - first
        for run, first in zip(wanted.positions, _starts(wanted.positions), strict=True)
        if first <= positions.start < first + len(run)
    )
    found = (
        _shifted(rows, wanted.rows.start),
        range(start, start + len(positions)),
        _shifted(ids, wanted.ids.start),
    )
    text = f"positions {_text(found[1])} of rows {_text(found[0])}, ids {_text(found[2])},"
    return text, {
        "first_row": found[0].start,
        "row_count": len(rows),
        "first_position": start,
        "position_count": len(positions),
        "first_id": found[2].start,
        "id_count": len(ids),
    }


def _missing(cell: tuple[range, ...], wanted: ShardBox, count: int) -> PayloadInvalidError:
    text, facts = _named(cell, wanted)
    return PayloadInvalidError(
        f"{text} are wanted, and none of the {count} shards holds them: every part of a slice "
        "comes from a shard, and nothing is filled in",
        facts={**facts, "shards": count},
    )


def _twice(
    cell: tuple[range, ...], wanted: ShardBox, one: ShardBox, other: ShardBox
) -> PayloadConflictError:
    text, facts = _named(cell, wanted)
    return PayloadConflictError(
        f"{text} are in {one.name} and in {other.name}: each part of a slice is in one shard; drop "
        "copies of a shard before it is planned",
        facts={**facts, "first_shard": one.name, "second_shard": other.name},
    )


def _text(run: range) -> str:
    return f"{run.start} to {run.stop - 1}"
