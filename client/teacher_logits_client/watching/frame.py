"""A frame: what a server shows, in the lines and columns that there are.

Where there are not enough lines, what says how the server is stays, and tables give way: each keeps
its head and a row or two, sessions take what is left, and a last line counts what is not shown.
Without a number of lines everything is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from teacher_logits.clock import span_text
from teacher_logits_client.watching.rates import NOTHING_YET, Rates
from teacher_logits_client.watching.sections import (
    Sort,
    pool_lines,
    refusal_lines,
    rest_line,
    session_lines,
    step_lines,
    teacher_lines,
    transport_lines,
)
from teacher_logits_client.watching.tables import line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.views import ServerView

_KEPT = 2
"""Lines that a table keeps before others grow: its head and a row."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """All that a frame says.

    ``view`` is the last that the server showed; None where it never answered. ``trouble`` is why
    it does not answer now, ``silent_seconds`` for how long. ``restarts`` counts the other servers
    that were found at the address. ``keys``: whether there is a keyboard to speak of.
    """

    address: str
    view: ServerView | None = None
    rates: Rates = NOTHING_YET
    trouble: str = ""
    silent_seconds: float = 0.0
    restarts: int = 0
    sort: Sort = Sort.LEASED
    paused: bool = False
    keys: bool = False


def draw(scene: Scene, *, width: int, height: int | None = None) -> list[Text]:
    """Return the lines of a frame, ``height`` at most, none wider than ``width``."""
    head = [_head(scene, width), *_trouble(scene, width)]
    foot = [_foot(scene, width)] if scene.keys else []
    view = scene.view
    if view is None:
        return _fit([*head, *foot], height)
    fixed = [*head, *pool_lines(view, width), *refusal_lines(view, scene.rates, width)]
    tables = [
        transport_lines(view, scene.rates, width),
        teacher_lines(view, scene.rates, width),
        step_lines(view, width),
        session_lines(view, scene.sort, width),
    ]
    tables = [each for each in tables if each]
    if height is not None:
        # A blank line stands before each table, as long as every row has room without it.
        spare = height - len(fixed) - len(foot)
        wanted = sum(map(len, tables)) + len(tables)
        gap = 1 if wanted <= spare or spare >= len(tables) * (_KEPT + 3) else 0
        tables = _shortened(tables, spare - gap * len(tables), width)
    else:
        gap = 1
    lines = list(fixed)
    for each in tables:
        lines += [Text("")] * gap + each
    if height is not None and foot:
        lines = _fit(lines, max(0, height - 1))
        lines += [Text("")] * (height - 1 - len(lines))
    return _fit([*lines, *foot], height)


def _shortened(tables: Sequence[list[Text]], room: int, width: int) -> list[list[Text]]:
    """Return tables in ``room`` lines together: a little of each, then rows of the last first."""
    given = [0] * len(tables)
    left = max(0, room)
    for least in (_KEPT, _KEPT + 1):
        for at in reversed(range(len(tables))):
            more = min(min(least, len(tables[at])) - given[at], left)
            given[at] += more
            left -= more
    # Sessions first, up to half of what is left; then the others; then sessions again.
    for at, most in [(len(tables) - 1, left // 2), *((at, left) for at in range(len(tables)))]:
        more = min(len(tables[at]) - given[at], most, left)
        given[at] += more
        left -= more
    return [_cut(each, count, width) for each, count in zip(tables, given, strict=True) if count]


def _cut(lines: list[Text], count: int, width: int) -> list[Text]:
    """Return the first lines of a table, the last of them a count of what is not shown."""
    if len(lines) <= count:
        return lines
    if count <= _KEPT:
        return lines[:count]
    return [*lines[: count - 1], rest_line(len(lines) - count + 1, width)]


def _fit(lines: list[Text], height: int | None) -> list[Text]:
    return lines if height is None else lines[: max(0, height)]


def _head(scene: Scene, width: int) -> Text:
    view = scene.view
    words = ["teacher-logits"]
    if scene.paused:
        words.append("PAUSED")
    if scene.trouble:
        words.append("no answer")
    elif view is not None:
        words.append("draining" if view.draining else "serving")
    if view is not None:
        words.append(f"up {span_text(view.uptime)}")
    if scene.restarts:
        words.append(f"restarted {scene.restarts}x")
    words.append(scene.address)
    if view is not None:
        words.append(f"release {view.version}, epoch {view.epoch}")
    return line(", ".join(words), width, "bold red" if scene.trouble else "bold")


def _trouble(scene: Scene, width: int) -> list[Text]:
    if not scene.trouble:
        return []
    shown = "what it showed last is below" if scene.view is not None else "nothing was seen yet"
    words = (
        f"no answer for {span_text(round(scene.silent_seconds))}, asking again; {shown} "
        f"({scene.trouble})"
    )
    return [line(words, width, "red")]


def _foot(scene: Scene, width: int) -> Text:
    pause = "go on" if scene.paused else "pause"
    return line(f"q quit  p {pause}  s sort by: {scene.sort.value}", width, "reverse")
