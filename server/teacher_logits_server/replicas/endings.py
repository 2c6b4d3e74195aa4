"""What is said when a replica ends, refuses to start, or fails on rows."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING

from teacher_logits.errors import EngineError, PoolFullError
from teacher_logits_server.engines import EngineProfile

if TYPE_CHECKING:
    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits_server.replicas.actor import Refused, StoreFull
    from teacher_logits_server.replicas.instructions import Fail


class RowsFailed(Exception):
    """What a replica's engine raised on some rows: its traceback, for the log."""


def difference(one: EngineProfile, other: EngineProfile) -> str:
    """Say in what two teachers differ that should be the same; empty where in nothing."""
    apart = [
        f"{each.name} {getattr(one, each.name)!r} and {getattr(other, each.name)!r}"
        for each in fields(EngineProfile)
        if getattr(one, each.name) != getattr(other, each.name)
    ]
    return ", ".join(apart)


def refusal_of(refused: Refused, replica: int) -> TeacherLogitsError:
    """Return what a replica says of its teacher as an error that says which replica it was."""
    error = refused.error
    return type(error)(
        f"replica {replica} on {refused.host_name}: {error.message}",
        facts={**error.facts, "replica": replica, "host": refused.host_name},
    )


def words_of_end(error: BaseException) -> str:
    """Return why an actor ended, as Ray has it, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("The actor is dead", "The actor died"))]
    return (told[-1] if told else " ".join(lines) or type(error).__name__)[:300]


def nobody_up(reason: str) -> EngineError:
    """Return the error of rows that no replica is there for."""
    return EngineError(
        f"no replica of the teacher is up ({reason}); they are tried again, and the server's log "
        "says how that goes",
        facts={"reason": reason},
    )


def lost_rows(told: Fail) -> EngineError:
    """Return the error of rows that replicas ended on, or that none is left for."""
    if told.lost < 2:
        return nobody_up(told.reason)
    return EngineError(
        f"the teacher's replicas ended {told.lost} times while they had these rows (at last: "
        f"{told.reason}): they may be what ends it; send fewer or shorter rows a request",
        facts={"lost": told.lost, "reason": told.reason},
    )


def store_full(full: StoreFull, *, node: str) -> PoolFullError:
    """Return the error of rows that were to stay on a node whose store others have filled."""
    return PoolFullError(
        f"{full.need_bytes} bytes were to stay in the object store of node {node[:12]}, which has "
        f"{full.used_bytes} in use by everybody and would spill to disk above {full.most_bytes}: "
        "free some of it, start the node with a larger store, or allow 'shared_memory' or 'stream'",
        facts={
            "need_bytes": full.need_bytes,
            "free_bytes": max(0, full.most_bytes - full.used_bytes),
            "used_bytes": full.used_bytes,
            "most_bytes": full.most_bytes,
            "node": node,
        },
        retry_after=timedelta(seconds=1),
    )
