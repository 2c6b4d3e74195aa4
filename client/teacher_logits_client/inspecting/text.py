"""A server's view as text for people: a few tables, and what calls for somebody's hand.

The text is for a terminal of 100 columns and may change; ``inspect_json`` has what programs read.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits_client.inspecting.replicas import node_store_lines, replica_lines
from teacher_logits_client.terminal_text import harmless
from teacher_logits_client.units import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.views import (
        DeviceSlabView,
        LeaseView,
        QueueView,
        ServerView,
        SessionView,
        StepView,
    )

_MAX_LEASES = 20
"""Leases that the text lists; the JSON has all."""
_MAX_STEPS = 20
"""Likewise of steps, the lowest first: they are what room waits for."""
_WIDTH = 100
_NAMES_WIDTH = 32
"""Columns for the ranks that a step waits for; the others are counted."""


def as_text(view: ServerView, *, address: str) -> str:
    """Return the view of the server at an address as a few aligned tables."""
    state = "draining: no new work, leases run out" if view.draining else "serving"
    pool = view.pool
    head = [
        f"server    {address}, {state}, up {span_text(view.uptime)}, release {view.version}, "
        f"epoch {view.epoch}",
        *(_teacher_line(teacher) for teacher in view.teachers),
        f"pool      {size_text(pool.used_bytes)} used, {size_text(pool.quarantined_bytes)} in "
        f"quarantine, {size_text(pool.free_bytes)} free of {size_text(pool.budget_bytes)}; "
        f"{_count(pool.extent_count, 'extent')} in {_count(pool.slab_count, 'slab')} of together "
        f"{size_text(pool.committed_bytes)}",
        *_queue_lines(view),
        *replica_lines(view.replicas),
        *_registered_lines(view),
        *_store_lines(view),
    ]
    parts = [
        *(line for text in head for line in _wrapped(text, behind=" " * 10)),
        "",
        *_session_section(view.sessions),
        *_step_section(view.steps),
        "",
        *_section("lease", _lease_rows(view.leases[:_MAX_LEASES], epoch=view.epoch)),
        *_rest(len(view.leases) - _MAX_LEASES, "lease"),
        *_advice(view, address),
    ]
    return "\n".join(map(harmless, parts))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _section(name: str, rows: list[list[str]]) -> list[str]:
    return table(rows) if len(rows) > 1 else [f"no {name}s"]


def _session_section(sessions: Sequence[SessionView]) -> list[str]:
    """Return each session as a row, with a line below it that says who it is."""
    if not sessions:
        return ["no sessions"]
    rows = [["SESSION", "STATE", "TRANSPORT", "LEASES", "LEASED"]]
    for each in sessions:
        rows.append(
            [
                each.session_id,
                each.state,
                _transports(each),
                str(each.lease_count),
                size_text(each.leased_bytes),
            ]
        )
    first, *others = table(rows)
    lines = [first]
    for each, row in zip(sessions, others, strict=True):
        lines += [row, *_wrapped(f"  {_who(each)}", behind=" " * 4)]
    return lines


def _who(session: SessionView) -> str:
    rank, teacher = session.data_parallel_rank, session.teacher_id
    who = f"{session.kind} {session.student_id}, rank {rank} of {teacher}"
    if not session.student_id:
        who = f"{session.kind} of {teacher}, shard {rank}"
    process = f"process {session.pid}" if session.pid else "its process unseen"
    return (
        f"{who}; {process} on {session.host_name or 'an unnamed host'}; "
        f"{span_text(session.age)} old, silent for {span_text(session.silent)}, "
        f"lives by {session.liveness}"
    )


def _lease_rows(leases: Sequence[LeaseView], *, epoch: str) -> list[list[str]]:
    """Return a row a lease; sessions go by what is behind the epoch, which all share."""
    rows = [["LEASE", "SESSION", "SIZE", "AGE", "STATE"]]
    for each in leases:
        state = "quarantine" if each.quarantined else "open"
        rows.append(
            [
                each.lease_id,
                each.session_id.replace(f"s-{epoch}-", "...", 1),
                size_text(each.size_bytes),
                span_text(each.age),
                state,
            ]
        )
    return rows


def _step_section(steps: Sequence[StepView]) -> list[str]:
    """Return the steps that are not retired; nothing where no teacher is published."""
    if not steps:
        return []
    rows = [["STEP", "TEACHER", "STAGE", "ROWS SEALED", "WAITS FOR"]]
    for each in steps[:_MAX_STEPS]:
        shown = _shown_names(each.waits_for)
        more = each.waiting_ranks - len(shown)
        names = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
        rows.append(
            [
                str(each.step),
                each.teacher_id,
                each.stage,
                f"{each.sealed_rows} of {each.real_rows}",
                names or "-",
            ]
        )
    return ["", *table(rows), *_rest(len(steps) - _MAX_STEPS, "step")]


def _queue_lines(view: ServerView) -> list[str]:
    """Return the queue, or that of each teacher where there are several, or one is not able."""
    if len(view.queues) < 2 and all(each.serving for each in view.queues):
        return [f"queue     {_queue_text(view.queue)}"]
    return [
        f"queue     {each.teacher_id}: {'' if each.serving else 'NOT SERVING, '}{_queue_text(each)}"
        for each in view.queues
    ]


def _queue_text(queue: QueueView) -> str:
    return (
        f"{_count(queue.waiting_requests, 'request')} waiting with "
        f"{queue.waiting_tokens:,} tokens, {queue.running_requests} running; "
        f"{_count(queue.scored_requests, 'request')} with {queue.scored_tokens:,} tokens scored"
    )


def _registered_lines(view: ServerView) -> list[str]:
    """Return what publishers registered, where there are some, and what lies on devices."""
    own = view.registered
    if not own.payload_count and not own.slab_count:
        return _device_lines(own.device_slabs)
    return [
        f"published {_count(own.payload_count, 'payload')} of {size_text(own.payload_bytes)}; in "
        f"publishers' own {_count(own.slab_count, 'slab')} of {size_text(own.committed_bytes)}: "
        f"{size_text(own.used_bytes)} used, {size_text(own.quarantined_bytes)} in quarantine",
        *_device_lines(own.device_slabs),
    ]


def _device_lines(slabs: Sequence[DeviceSlabView]) -> list[str]:
    """Return what lies in device memory, a line a writer and device."""
    groups: dict[tuple[str, str], list[DeviceSlabView]] = {}
    for each in slabs:
        groups.setdefault((each.writer_id, each.device_uuid), []).append(each)
    return [
        f"device    {uuid}: {_count(len(own), 'slab')} of {writer_id}, "
        f"{size_text(sum(each.used_bytes for each in own))} used of "
        f"{size_text(sum(each.size_bytes for each in own))}; passed to "
        f"{_count(max(each.reader_count for each in own), 'session')}"
        for (writer_id, uuid), own in groups.items()
    ]


def _store_lines(view: ServerView) -> list[str]:
    """Return what is in a Ray cluster's object store, where the server has joined one."""
    store = view.object_store
    if store is None:
        return []
    if store.state == "lost":
        return ["objects   the Ray cluster is gone: payloads are streamed in their place"]
    spilled = f", {size_text(store.spilled_bytes)} SPILLED to disk" if store.spilled_bytes else ""
    waiting = f", {store.waiting_count} wait for room" if store.waiting_count else ""
    again = f", {_count(store.holder_restarts, 'restart')}" if store.holder_restarts else ""
    return [
        f"objects   {size_text(store.used_bytes)} of {size_text(store.budget_bytes)} in "
        f"{_count(store.object_count, 'object')}{waiting}; the node's store has "
        f"{size_text(store.store_used_bytes)} of {size_text(store.store_bytes)}{spilled}; "
        f"holder {store.holder}{again}",
        *node_store_lines(store.nodes),
    ]


def _advice(view: ServerView, address: str) -> list[str]:
    """Return what holds room and can do nothing about it by itself, and what ends it."""
    lines = []
    for each in view.sessions:
        kept = f"its {_count(each.lease_count, 'lease')} of {size_text(each.leased_bytes)}"
        reclaim = f"`teacher-logits inspect {address} --reclaim {each.session_id} --yes`"
        if each.state == "unresponsive":
            lines.append(
                f"unresponsive: process {each.pid} of session {each.session_id} is stopped, and "
                f"{kept} stay taken: have it go on (kill -CONT {each.pid}), end it, or take them "
                f"by force: {reclaim}"
            )
        elif each.state == "died":
            lines.append(
                f"died: process {each.pid} of session {each.session_id} is gone, and {kept} stay "
                f"taken while a child of that holds its line: end the child, or take them by "
                f"force: {reclaim}"
            )
    for teacher_id in sorted({each.teacher_id for each in view.steps if each.stage == "deserted"}):
        lines.append(
            f"deserted: everybody has left teacher {teacher_id}, and what is left of it goes after "
            f"--keep-deserted; or now: `teacher-logits inspect {address} --reclaim "
            f"teacher:{teacher_id} --yes`"
        )
    by_id = {each.session_id: each for each in view.sessions}
    doubts = {(each.session_id, each.doubt) for each in view.leases if each.quarantined}
    for session_id, doubt in sorted(doubts):
        pid = by_id[session_id].pid if session_id in by_id else 0
        reclaim = f"`teacher-logits inspect {address} --reclaim {session_id} --yes`"
        if doubt == "ttl_passed":
            why = "passed its TTL without proof that nobody reads:"
        else:
            who = f"process {pid}" if pid else "its process"
            why = f"let go of its line while {who} lived: end that, and the room is free; or"
        lines.append(f"quarantine: session {session_id} {why} take it by force: {reclaim}")
    return ["", *lines] if lines else []


def _shown_names(names: Sequence[str]) -> Sequence[str]:
    """Return as many names, one at least, as find room."""
    shown = names
    while len(shown) > 1 and len(", ".join(shown)) > _NAMES_WIDTH:
        shown = shown[:-1]
    return shown


def _wrapped(text: str, *, behind: str) -> list[str]:
    """Return text as lines of a terminal; ``behind`` is what the second and later begin with."""
    return textwrap.wrap(
        text,
        _WIDTH,
        subsequent_indent=behind,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _rest(count: int, name: str) -> list[str]:
    return [f"... and {_count(count, name)} more; --json has all"] if count > 0 else []


def _transports(session: SessionView) -> str:
    names = {each.transport.value if each.transport else "none" for each in session.settlements}
    return ",".join(sorted(names)) or "opening"


def _teacher_line(teacher: TeacherProfile) -> str:
    return (
        f"teacher   {teacher.teacher_id}: {teacher.vocabulary_size:,} ids, top-k up to "
        f"{teacher.top_k}, rows up to {teacher.max_row_tokens:,} tokens, engine "
        f"{teacher.engine or 'unknown'} in {teacher.arithmetic_type or 'unknown arithmetic'}"
    )


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"
