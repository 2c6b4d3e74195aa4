"""What a server is told of the most that its clients may have; a group of ``settings``.

Each is checked where that is counted, by a ``caps.Cap`` of the same name. docs/limits.md has the
table: what a client controls, which limit bounds it, and what a refusal says.
"""

from __future__ import annotations

from dataclasses import dataclass

from teacher_logits_server import readers
from teacher_logits_server.flags import setting as _set
from teacher_logits_server.flags import settings_of


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """limits"""

    max_sessions: int = _set(4096, "--max-sessions", readers.COUNT, "most student ranks at a time")
    max_student_sessions: int = _set(
        2048,
        "--max-student-sessions",
        readers.COUNT,
        "most ranks of one student (student_id) at a time",
    )
    max_publishers: int = _set(1024, "--max-publishers", readers.COUNT, "most publishers at a time")
    max_user_lines: int = _set(
        2048,
        "--max-user-lines",
        readers.COUNT,
        "most connections that one user's processes may have to the broker",
    )
    max_calls: int = _set(
        8192,
        "--max-calls",
        readers.COUNT,
        "most calls under way at a time, a quarter of them over one connection",
    )
    max_watchers: int = _set(
        1024, "--max-watchers", readers.COUNT, "most calls that watch the server's health"
    )
    max_waiting_calls: int = _set(
        4096,
        "--max-waiting-calls",
        readers.COUNT,
        "most calls that wait for steps, and as many for room and for teachers",
    )
    max_session_calls: int = _set(
        64,
        "--max-session-calls",
        readers.COUNT,
        "most waiting calls of each of these kinds that one session may have",
    )
    max_session_streams: int = _set(
        64, "--max-session-streams", readers.COUNT, "most streams of payloads to one session"
    )
    max_session_leases: int = _set(
        16384, "--max-session-leases", readers.COUNT, "most leases of one session"
    )
    max_session_share: float = _set(
        0.75,
        "--max-session-share",
        readers.SHARE,
        "share of the pool that what is scored for one session may take while there are others",
    )
    max_request_tokens: int = _set(
        65536,
        "--max-request-tokens",
        readers.COUNT,
        "most tokens that one request may hold, prefixes included",
    )
    max_batch_tokens: int = _set(
        8192,
        "--max-batch-tokens",
        readers.COUNT,
        "tokens, padding included, that run through the teacher together",
    )
    max_waiting_requests: int = _set(
        1024,
        "--max-waiting-requests",
        readers.COUNT,
        "most scoring requests that wait; the next one is refused, but for the first of a session",
    )
    max_session_requests: int = _set(
        256,
        "--max-session-requests",
        readers.COUNT,
        "most scoring requests of one session that wait or run",
    )
    max_reservations: int = _set(
        1024,
        "--max-reservations",
        readers.COUNT,
        "most payloads that one publisher has reserved and not sealed",
    )
    max_steps: int = _set(
        4096,
        "--max-steps",
        readers.COUNT,
        "most steps of a published teacher that are not retired",
    )
    max_slabs: int = _set(
        1024,
        "--max-slabs",
        readers.COUNT,
        "most slabs of one publisher's own, each a descriptor that the server keeps",
    )
    keep_steps: int = _set(
        0,
        "--keep-steps",
        readers.COUNT,
        "keep this many steps of a published teacher at most, and let older ones go even unread; "
        "0 keeps each until every student has read it",
    )


def broken_rule(config: LimitSettings) -> tuple[str, object, str] | None:
    """Return the first limit that makes no sense: its field, value, and the rule."""
    for name, _, setting in settings_of(LimitSettings):
        value, floor = getattr(config, name), int(name != "keep_steps")
        if setting.reader is readers.COUNT and value < floor:
            return name, value, f"must be at least {floor}"
    if not 0 < config.max_session_share <= 1:
        return "max_session_share", config.max_session_share, "must be more than 0, and at most 1"
    return None
