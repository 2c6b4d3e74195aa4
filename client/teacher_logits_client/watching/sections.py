"""What a frame is made of, each from a server's view and its rates, in lines of a width.

A number that is not known yet, for want of a second look, is ``-``; so is one that an older server
does not tell.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from rich.text import Text

from teacher_logits.clock import span_text
from teacher_logits_client.units import size_text
from teacher_logits_client.watching import rates as names
from teacher_logits_client.watching.rates import counts
from teacher_logits_client.watching.tables import Column, bar, cut, line, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from teacher_logits.views import ServerView, SessionView
    from teacher_logits_client.watching.rates import Rates

_STYLES = {
    "unresponsive": "red",
    "died": "red",
    "ended": "red",
    "silent": "yellow",
    "closed": "yellow",
    "opening": "cyan",
}
_STAGE_STYLES = {"lost": "red", "deserted": "yellow", "open": "cyan"}
_MEMORY = {"local", "cuda_ipc", "shared_memory"}
_LABEL = 10
_LEAST_BAR = 12


class Sort(enum.Enum):
    """What sessions are sorted by; the first is what one begins with."""

    LEASED = "leased"
    SEEN = "seen"
    STATE = "state"
    WHO = "who"

    def next(self) -> Sort:
        """Return the one behind it; the first behind the last."""
        every = list(Sort)
        return every[(every.index(self) + 1) % len(every)]


_ORDERS: dict[Sort, Callable[[SessionView], tuple[object, ...]]] = {
    Sort.LEASED: lambda each: (-each.leased_bytes, -each.lease_count, each.session_id),
    Sort.SEEN: lambda each: (-each.silent, each.session_id),
    Sort.STATE: lambda each: (-_gravity(each.state), each.state, each.session_id),
    Sort.WHO: lambda each: (each.kind, each.student_id, each.data_parallel_rank, each.session_id),
}


def pool_lines(view: ServerView, width: int) -> list[Text]:
    """Return a bar for the pool, and one for each other kind of room that there is."""
    pool, own, store = view.pool, view.registered, view.object_store
    rooms = [("pool", pool.used_bytes, pool.quarantined_bytes, pool.budget_bytes)]
    if own.slab_count:
        rooms.append(("published", own.used_bytes, own.quarantined_bytes, own.committed_bytes))
    if own.device_slabs:
        used = sum(each.used_bytes for each in own.device_slabs)
        size = sum(each.size_bytes for each in own.device_slabs)
        rooms.append(("device", used, 0, size))
    if store is not None:
        rooms.append(("objects", store.used_bytes, 0, store.budget_bytes))
    return [_room_line(*room, width=width) for room in rooms]


def _room_line(name: str, used: int, quarantined: int, size: int, *, width: int) -> Text:
    free = max(0, size - used - quarantined)
    words = (
        f"{size_text(used)} used, {size_text(quarantined)} quarantined, {size_text(free)} free of "
        f"{size_text(size)}"
    )
    short = f"{size_text(used)} of {size_text(size)}"
    text = Text(f"{name:<{_LABEL}}", no_wrap=True)
    says = words if width - _LABEL - len(words) - 1 >= _LEAST_BAR else short
    room = width - _LABEL - len(says) - 1
    if room >= _LEAST_BAR:
        whole = max(1, size)
        parts = [(used / whole, "|", "green"), (quarantined / whole, "q", "red")]
        text.append_text(bar(parts, room))
        text.append(" ")
    text.append(says)
    text.truncate(width)
    return text


def transport_lines(view: ServerView, rates: Rates, width: int) -> list[Text]:
    """Return a row a transport: sessions that have it, and how fast payloads come over it."""
    leases, sizes = counts(view, names.GRANTED_LEASES), counts(view, names.GRANTED_BYTES)
    sessions: dict[str, int] = {}
    for each in view.sessions:
        for name in _transports_of(each):
            sessions[name] = sessions.get(name, 0) + 1
    shown = sorted({*sessions, *leases, *sizes} - {"none", "opening", ""})
    if not shown:
        return []
    columns = [
        Column(head="TRANSPORT"),
        Column(head="SESSIONS", right=True, rank=2),
        Column(head="BYTES/S", right=True),
        Column(head="LEASES/S", right=True, rank=1),
        Column(head="BYTES", right=True, rank=3),
        Column(head="COPIED", rank=4),
    ]
    rows = [
        [
            name,
            f"{sessions.get(name, 0):,}",
            size_rate(rates.rate(names.GRANTED_BYTES, name)),
            number(rates.rate(names.GRANTED_LEASES, name)),
            size_text(round(sizes[name])) if name in sizes else "-",
            "no" if name in _MEMORY else "yes",
        ]
        for name in shown
    ]
    return table(columns, rows, width)


def teacher_lines(view: ServerView, rates: Rates, width: int) -> list[Text]:
    """Return a row a teacher: what it scores, and what waits; a published one has neither."""
    scored = counts(view, names.SCORED_TOKENS)
    running, waiting = _requests(view, "running"), _requests(view, "waiting")
    tokens = counts(view, names.WAITING_TOKENS)
    columns = [
        Column(head="TEACHER", grows=True),
        Column(head="TOKENS/S", right=True),
        Column(head="REQ/S", right=True, rank=4),
        Column(head="WAITING", right=True, rank=1),
        Column(head="TOKENS", right=True, rank=3),
        Column(head="RUNNING", right=True, rank=5),
        Column(head="FILL", right=True, rank=2),
        Column(head="BUSY", right=True, rank=6),
    ]
    rows = []
    for each in view.teachers:
        name = each.teacher_id
        if name not in scored:
            rows.append([name, "published" if view.metrics else "-", *["-"] * 6])
            continue
        rows.append(
            [
                name,
                number(rates.rate(names.SCORED_TOKENS, name)),
                number(rates.rate(names.SCORED_REQUESTS, name)),
                f"{waiting.get(name, 0):,.0f}",
                f"{tokens.get(name, 0):,.0f}",
                f"{running.get(name, 0):,.0f}",
                percent(rates.share(names.PASS_FILLS, names.PASSES, name)),
                percent(rates.rate(names.PASS_SECONDS, name)),
            ]
        )
    return table(columns, rows, width) if rows else []


def refusal_lines(view: ServerView, rates: Rates, width: int) -> list[Text]:
    """Return what was refused since the server's start, the most frequent reasons first."""
    found = counts(view, names.REFUSALS)
    if not view.metrics:
        return []
    words = []
    for reason, count in sorted(found.items(), key=lambda each: (-each[1], each[0])):
        speed = rates.rate(names.REFUSALS, reason) or 0.0
        words.append(f"{reason} {count:,.0f}" + (f" (+{number(speed)}/s)" if speed else ""))
    text = f"{'refused':<{_LABEL}}{', '.join(words) or 'nothing'}"
    return [line(text, width, "yellow" if words else "")]


def step_lines(view: ServerView, width: int) -> list[Text]:
    """Return a row a step that is not retired, the lowest first: they are what room waits for."""
    if not view.steps:
        return []
    columns = [
        Column(head="STEP", right=True),
        Column(head="TEACHER", rank=3, grows=True),
        Column(head="STAGE", rank=1),
        Column(head="ROWS", rank=2),
        Column(head="WAITS FOR", grows=True),
    ]
    rows, styles = [], []
    for each in sorted(view.steps, key=lambda step: (step.step, step.teacher_id)):
        more = each.waiting_ranks - len(each.waits_for)
        waits = ", ".join(each.waits_for) + (f" and {more} more" if more > 0 else "")
        sealed = f"{each.sealed_rows}/{each.real_rows}"
        rows.append([str(each.step), each.teacher_id, each.stage, sealed, waits or "-"])
        styles.append(_STAGE_STYLES.get(each.stage, ""))
    return table(columns, rows, width, styles)


def session_lines(view: ServerView, sort: Sort, width: int) -> list[Text]:
    """Return a row a session, sorted."""
    if not view.sessions:
        return [line("no sessions", width)]
    columns = [
        Column(head="SESSION", rank=5),
        Column(head="WHO", grows=True),
        Column(head="RANK", right=True, rank=3),
        Column(head="STATE", rank=1),
        Column(head="TRANSPORT", rank=2),
        Column(head="LEASES", right=True, rank=4),
        Column(head="LEASED", right=True),
        Column(head="SEEN", right=True, rank=1),
        Column(head="PID", right=True, rank=6),
    ]
    sessions = sorted(view.sessions, key=_ORDERS[sort])
    rows = [
        [
            _short_id(each.session_id, view.epoch),
            each.student_id or f"publisher of {each.teacher_id}",
            str(each.data_parallel_rank),
            each.state,
            ",".join(_transports_of(each)),
            str(each.lease_count),
            size_text(each.leased_bytes),
            span_text(each.silent),
            str(each.pid or "-"),
        ]
        for each in sessions
    ]
    return table(columns, rows, width, [_STYLES.get(each.state, "") for each in sessions])


def number(value: float | None) -> str:
    """Return a number of three digits or so, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def size_rate(value: float | None) -> str:
    """Return bytes a second, or a dash."""
    return "-" if value is None else size_text(round(value))


def percent(value: float | None) -> str:
    """Return a share in hundredths, or a dash."""
    return "-" if value is None else f"{value:.0%}"


def rest_line(left_out: int, width: int) -> Text:
    """Return the line that stands for rows that found no room."""
    return Text(cut(f"... and {left_out:,} more", width), style="dim", no_wrap=True)


def _requests(view: ServerView, state: str) -> dict[str, float]:
    return {
        each.label("teacher"): each.value
        for each in view.metrics
        if each.name == names.QUEUE_REQUESTS and each.label("state") == state
    }


def _transports_of(session: SessionView) -> Sequence[str]:
    found: Iterable[str] = (
        each.transport.value if each.transport else "none" for each in session.settlements
    )
    return sorted(set(found)) or ["opening"]


def _short_id(session_id: str, epoch: str) -> str:
    """Return an id without the epoch, which all have; its first letters tell sessions apart."""
    return session_id.removeprefix(f"s-{epoch}-")[:6]


def _gravity(state: str) -> int:
    return {"red": 3, "yellow": 2, "cyan": 1}.get(_STYLES.get(state, ""), 0)
