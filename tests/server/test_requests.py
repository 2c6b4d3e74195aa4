"""Requests in their flat form mean what they would mean row by row."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.digest import row_digest
from teacher_logits_server.engines.requests import read_request

if TYPE_CHECKING:
    from collections.abc import Sequence

ids = st.integers(0, 99)


@st.composite
def rows_with_windows(
    draw: st.DrawFn,
) -> tuple[list[list[int]], list[list[int]], list[tuple[int, int]]]:
    rows = draw(st.lists(st.lists(ids, min_size=1, max_size=6), min_size=1, max_size=6))
    prefixes = [draw(st.lists(ids, max_size=3)) for _ in rows]
    firsts = [draw(st.integers(0, len(row))) for row in rows]
    windows = [
        (first, draw(st.integers(0, len(row) - first)))
        for row, first in zip(rows, firsts, strict=True)
    ]
    return rows, prefixes, windows


def flat(rows: Sequence[Sequence[int]]) -> bytes:
    return b"".join(array("i", row).tobytes() for row in rows)


@given(rows_with_windows(), st.data())
def test_the_flat_form_means_what_its_rows_mean(
    drawn: tuple[list[list[int]], list[list[int]], list[tuple[int, int]]], data: st.DataObject
) -> None:
    rows, prefixes, windows = drawn
    request = read_request(
        input_ids=flat(rows),
        row_lengths=[len(row) for row in rows],
        prefix_ids=flat(prefixes),
        prefix_lengths=[len(prefix) for prefix in prefixes],
        row_windows=windows,
    )
    whole = list(zip(rows, prefixes, windows, strict=True))
    assert request.token_count == sum(len(row) + len(prefix) for row, prefix, _ in whole)
    assert request.next_ids().tolist() == [
        [*row, -1][place + 1]
        for row, _, (first, count) in whole
        for place in range(first, first + count)
    ]
    assert request.digests().tolist() == [list(row_digest(row)) for row in rows]

    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    wanted = [
        ([*prefix, *row[: first + count]], len(prefix) + first, count)
        for row, prefix, (first, count) in whole[start:stop]
        if count
    ]
    given_rows = request.engine_rows(start, stop - start)
    assert [(r.token_ids.tolist(), r.first, r.count) for r in given_rows] == wanted
    costs = request.computed_tokens()[start:stop]
    assert [cost for cost in costs if cost] == [len(tokens) for tokens, _, _ in wanted]
