"""A server's view as text for people and as JSON for programs.

The JSON's keys are stable: sizes in bytes, spans in seconds, names as the contract has them.
The text is for a terminal and may change.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits_client.units import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.views import LeaseView, ServerView, SessionView

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

_MAX_LEASES = 20
"""Leases that the text lists; the JSON has all."""


def as_json(view: ServerView, *, address: str) -> str:
    """Return the view of the server at an address as one JSON object."""
    pool, queue = view.pool, view.queue
    document: Json = {
        "address": address,
        "epoch": view.epoch,
        "version": view.version,
        "uptime_seconds": view.uptime.total_seconds(),
        "draining": view.draining,
        "teachers": [_teacher_json(teacher) for teacher in view.teachers],
        "sessions": [_session_json(session) for session in view.sessions],
        "leases": [_lease_json(lease) for lease in view.leases],
        "pool": {
            "budget_bytes": pool.budget_bytes,
            "committed_bytes": pool.committed_bytes,
            "used_bytes": pool.used_bytes,
            "quarantined_bytes": pool.quarantined_bytes,
            "free_bytes": pool.free_bytes,
            "slab_count": pool.slab_count,
            "extent_count": pool.extent_count,
        },
        "queue": {
            "waiting_requests": queue.waiting_requests,
            "waiting_tokens": queue.waiting_tokens,
            "running_requests": queue.running_requests,
            "scored_requests": queue.scored_requests,
            "scored_tokens": queue.scored_tokens,
        },
    }
    return json.dumps(document, indent=2)


def as_text(view: ServerView, *, address: str) -> str:
    """Return the view of the server at an address as a few aligned tables."""
    state = "draining: no new work, leases run out" if view.draining else "serving"
    pool, queue = view.pool, view.queue
    parts = [
        f"server    {address}, {state}, up {span_text(view.uptime)}, release {view.version}, "
        f"epoch {view.epoch}",
        *(_teacher_line(teacher) for teacher in view.teachers),
        f"pool      {size_text(pool.used_bytes)} used, {size_text(pool.quarantined_bytes)} in "
        f"quarantine, {size_text(pool.free_bytes)} free of {size_text(pool.budget_bytes)}; "
        f"{_count(pool.extent_count, 'extent')} in {_count(pool.slab_count, 'slab')} of together "
        f"{size_text(pool.committed_bytes)}",
        f"queue     {_count(queue.waiting_requests, 'request')} waiting with "
        f"{queue.waiting_tokens:,} tokens, {queue.running_requests} running; "
        f"{_count(queue.scored_requests, 'request')} with {queue.scored_tokens:,} tokens scored",
        "",
        *_section("session", _session_rows(view.sessions)),
        "",
        *_section("lease", _lease_rows(view.leases[:_MAX_LEASES])),
    ]
    left_out = len(view.leases) - _MAX_LEASES
    if left_out > 0:
        parts.append(f"... and {_count(left_out, 'lease')} more; --json has all")
    return "\n".join(parts)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _section(name: str, rows: list[list[str]]) -> list[str]:
    return table(rows) if len(rows) > 1 else [f"no {name}s"]


def _session_rows(sessions: Sequence[SessionView]) -> list[list[str]]:
    head = ["SESSION", "STUDENT", "RANK", "TEACHER", "TRANSPORT", "LIVES BY", "AGE", "SILENT"]
    rows = [[*head, "PID", "HOST", "LEASES", "LEASED"]]
    for each in sessions:
        rows.append(
            [
                each.session_id,
                each.student_id,
                str(each.data_parallel_rank),
                each.teacher_id,
                _transports(each),
                each.liveness,
                span_text(each.age),
                span_text(each.silent),
                str(each.pid) if each.pid else "-",
                each.host_name or "-",
                str(each.lease_count),
                size_text(each.leased_bytes),
            ]
        )
    return rows


def _lease_rows(leases: Sequence[LeaseView]) -> list[list[str]]:
    rows = [["LEASE", "SESSION", "PAYLOAD", "SIZE", "AGE", "STATE"]]
    for each in leases:
        state = "quarantine" if each.quarantined else "open"
        rows.append(
            [
                each.lease_id,
                each.session_id,
                each.payload_id,
                size_text(each.size_bytes),
                span_text(each.age),
                state,
            ]
        )
    return rows


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


def _teacher_json(teacher: TeacherProfile) -> Json:
    return {
        "teacher_id": teacher.teacher_id,
        "revision": teacher.revision,
        "vocabulary_size": teacher.vocabulary_size,
        "head_rows": teacher.head_rows,
        "top_k": teacher.top_k,
        "max_row_tokens": teacher.max_row_tokens,
        "tokenizer_fingerprint": teacher.tokenizer_fingerprint,
        "engine": teacher.engine,
        "arithmetic_type": teacher.arithmetic_type,
    }


def _session_json(session: SessionView) -> Json:
    return {
        "session_id": session.session_id,
        "student_id": session.student_id,
        "teacher_id": session.teacher_id,
        "data_parallel_rank": session.data_parallel_rank,
        "transports": [
            {
                "writer_id": each.writer_id,
                "transport": each.transport.value if each.transport else None,
                "refusals": [
                    {
                        "transport": refusal.transport.value,
                        "reason": refusal.reason.value,
                        "message": refusal.message,
                    }
                    for refusal in each.refusals
                ],
            }
            for each in session.settlements
        ],
        "liveness": session.liveness,
        "age_seconds": session.age.total_seconds(),
        "silent_seconds": session.silent.total_seconds(),
        "pid": session.pid,
        "host_name": session.host_name,
        "lease_count": session.lease_count,
        "leased_bytes": session.leased_bytes,
    }


def _lease_json(lease: LeaseView) -> Json:
    return {
        "lease_id": lease.lease_id,
        "session_id": lease.session_id,
        "payload_id": lease.payload_id,
        "size_bytes": lease.size_bytes,
        "age_seconds": lease.age.total_seconds(),
        "quarantined": lease.quarantined,
    }
