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
        "the Ray cluster at host:port, or auto for the one that runs here (which --engine ray "
        "means where this is left out); a node of it runs on this machine",
    )
    ray_namespace: str = _set(
        "teacher-logits",
        "--ray-namespace",
        readers.NAME,
        "namespace of the server's actors, for `ray list actors`",
    )
