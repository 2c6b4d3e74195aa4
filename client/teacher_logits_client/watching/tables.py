"""Lines that fit a width: columns that give way, bars, and text that cannot harm a terminal.

What clients named (students, hosts, teachers) may have control characters and wide ones: the first
are shown as ``?``, the others take the cells that they take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from teacher_logits_client.terminal_text import harmless

if TYPE_CHECKING:
    from collections.abc import Sequence

_GAP = 2
_LEAST_FLEXIBLE = 12


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column. The one of the highest ``rank`` is the first to be left out; 0 never is.

    ``grows``: it takes what is left, and gives room away before another is left out.
    """

    head: str
    rank: int = 0
    right: bool = False
    grows: bool = False


def line(text: str, width: int, style: str = "") -> Text:
    """Return a line of a width at most."""
    return Text(cut(harmless(text), width), style=style, no_wrap=True)


def cut(text: str, width: int) -> str:
    """Return text in ``width`` cells at most, with an ellipsis where it was longer."""
    if cell_len(text) <= width:
        return text
    if width <= 3:
        return set_cell_size(text, max(0, width))
    return set_cell_size(text, width - 3) + "..."


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, styles: Sequence[str] = ()
) -> list[Text]:
    """Return a head and rows as lines of a width; columns that find no room are left out."""
    cells = [[harmless(cell) for cell in row] for row in rows]
    widths = [
        max([cell_len(column.head), *(cell_len(row[at]) for row in cells)])
        for at, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    while len(shown) > 1 and _least(columns, widths, shown) > width:
        last = max(shown, key=lambda at: (columns[at].rank, at))
        if columns[last].rank == 0:
            break
        shown.remove(last)
    over = sum(widths[at] for at in shown) + _GAP * (len(shown) - 1) - width
    for at in shown:
        if columns[at].grows and over > 0:
            widths[at] = max(_LEAST_FLEXIBLE, widths[at] - over)
    heads = [column.head for column in columns]
    return [
        Text(cut(_joined(columns, row, widths, shown), width), style=style, no_wrap=True)
        for row, style in zip(
            [heads, *cells], ["bold", *(styles or [""] * len(cells))], strict=True
        )
    ]


def bar(parts: Sequence[tuple[float, str, str]], width: int) -> Text:
    """Return a bar ``[||||qq  ]``: (share of the whole, character, style) a part, in order.

    A part that is not nothing takes a cell at least.
    """
    room = max(1, width - 2)
    text = Text("[", no_wrap=True)
    left = room
    for share, character, style in parts:
        size = min(left, max(round(share * room), 1 if share > 0 else 0))
        text.append(character * size, style=style)
        left -= size
    text.append(" " * left + "]")
    return text


def _least(columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int]) -> int:
    """Return the cells that the columns need where those that grow give way."""
    needed = (min(widths[at], _LEAST_FLEXIBLE) if columns[at].grows else widths[at] for at in shown)
    return sum(needed) + _GAP * (len(shown) - 1)


def _joined(
    columns: Sequence[Column], row: Sequence[str], widths: Sequence[int], shown: Sequence[int]
) -> str:
    cells = []
    for at in shown:
        text = cut(row[at], widths[at])
        room = " " * (widths[at] - cell_len(text))
        cells.append(room + text if columns[at].right else text + room)
    return (" " * _GAP).join(cells).rstrip()
