"""What each of several teachers of one server may have of its own; the rest is the server's."""

from __future__ import annotations

from teacher_logits_server.flags import settings_of
from teacher_logits_server.replica_settings import ReplicaSettings
from teacher_logits_server.settings import TeacherSettings

OF_A_TEACHER = (
    *(
        name
        for group in (TeacherSettings, ReplicaSettings)
        for name, _, _ in settings_of(group)
        if name not in ("teachers", "teacher_id", "threads", "device_pool_size_bytes")
    ),
    "pool_size_bytes",
    "max_batch_tokens",
    "max_waiting_requests",
)
"""Names of fields of ``ServerConfig``."""
