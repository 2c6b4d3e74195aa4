"""A server's view as JSON for programs.

The keys are stable: sizes in bytes, spans in seconds, names as the contract's ``views`` have them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.views import LeaseView, QueueView, ServerView, SessionView, StepView

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


def as_json(view: ServerView, *, address: str) -> str:
    """Return the view of the server at an address as one JSON object."""
    pool = view.pool
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
        "registered": asdict(view.registered),
        "object_store": None if view.object_store is None else asdict(view.object_store),
        "replicas": [asdict(replica) for replica in view.replicas],
        "steps": [_step_json(step) for step in view.steps],
        "queue": _queue_json(view.queue),
        "queues": [
            {"teacher_id": queue.teacher_id, "serving": queue.serving, **_queue_json(queue)}
            for queue in view.queues
        ],
        "metrics": [
            {"name": each.name, "labels": dict(each.labels), "value": each.value}
            for each in view.metrics
        ],
    }
    return json.dumps(document, indent=2)


def _queue_json(queue: QueueView) -> dict[str, Json]:
    return {
        "waiting_requests": queue.waiting_requests,
        "waiting_tokens": queue.waiting_tokens,
        "running_requests": queue.running_requests,
        "scored_requests": queue.scored_requests,
        "scored_tokens": queue.scored_tokens,
    }


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
        "kind": session.kind,
        "state": session.state,
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
        "doubt": lease.doubt,
    }


def _step_json(step: StepView) -> Json:
    return {
        "teacher_id": step.teacher_id,
        "step": step.step,
        "stage": step.stage,
        "sealed_rows": step.sealed_rows,
        "real_rows": step.real_rows,
        "waiting_ranks": step.waiting_ranks,
        "waits_for": list(step.waits_for),
    }
