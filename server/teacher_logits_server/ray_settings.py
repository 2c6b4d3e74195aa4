"""What a server is told of a Ray cluster; a group of ``settings``."""

from __future__ import annotations

from dataclasses import dataclass

from teacher_logits_server import readers
from teacher_logits_server.flags import setting as _set


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """a Ray cluster (needs the extra: pip install 'teacher-logits[ray]')"""

    ray_address: str = _set(
        "",
        "--ray-address",
        readers.NAME,
        "join the Ray cluster at host:port, or auto for the one that runs here, and hand payloads "
        "to its workers and drivers as objects of its store; --engine ray runs there, and means "
        "auto where this is left out; a node of it runs on this machine",
    )
    ray_namespace: str = _set(
        "teacher-logits",
        "--ray-namespace",
        readers.NAME,
        "namespace of the server's actors, for `ray list actors`",
    )
    ray_budget_bytes: int = _set(
        0,
        "--ray-budget",
        readers.SIZE,
        "most bytes of payloads in the object store of this node; 0 is half of it; whoever finds "
        "no room waits, or is streamed to",
    )
