"""What the doctor looks up in the environment: here alone, and only when it is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass

from teacher_logits.socket_path import default_socket_path, user_runtime_folder

_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The environment, as far as it matters here.

    ``runtime_folder`` is that of the user (XDG_RUNTIME_DIR), empty where there is none;
    ``socket_path`` is where a server of this user listens when told nothing; ``proxies`` are
    names of variables, without their values, which may hold passwords.
    """

    runtime_folder: str
    socket_path: str
    proxies: tuple[str, ...]


def read_surroundings() -> Surroundings:
    """Look at the environment of this process."""
    return Surroundings(
        runtime_folder=user_runtime_folder(os.environ),
        socket_path=default_socket_path(os.environ),
        proxies=tuple(
            name for lower in _PROXIES for name in (lower, lower.upper()) if os.environ.get(name)
        ),
    )
