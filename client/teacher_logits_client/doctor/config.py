"""What the doctor looks up in the environment: here alone, and only when it is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from teacher_logits.socket_path import default_socket_path, user_runtime_folder

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
_EXEMPTIONS = ("no_grpc_proxy", "no_proxy")
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_TOKEN_FILE = Path(".ray") / "auth_token"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The environment, as far as it matters here.

    ``runtime_folder`` is that of the user (XDG_RUNTIME_DIR), empty where there is none;
    ``socket_path`` is where a server of this user listens when told nothing; ``proxies`` are
    names of variables, without their values, which may hold passwords; ``exempt`` are the hosts
    that go past them. ``allocators`` are torch's settings by their variables. ``has_ray_token``
    says whether Ray finds a token, and nobody here reads it.
    """

    runtime_folder: str = ""
    socket_path: str = ""
    proxies: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()
    allocators: tuple[tuple[str, str], ...] = ()
    visible_devices: str = ""
    ray_address: str = ""
    ray_auth_mode: str = ""
    has_ray_token: bool = False


def read_surroundings() -> Surroundings:
    """Look at the environment of this process."""
    given = os.environ
    return Surroundings(
        runtime_folder=user_runtime_folder(given),
        socket_path=default_socket_path(given),
        proxies=tuple(
            name for lower in _PROXIES for name in (lower, lower.upper()) if given.get(name)
        ),
        exempt=_exempt(),
        allocators=tuple((name, given[name]) for name in _ALLOCATORS if given.get(name)),
        visible_devices=given.get("CUDA_VISIBLE_DEVICES", ""),
        ray_address=given.get("RAY_ADDRESS", ""),
        ray_auth_mode=given.get("RAY_AUTH_MODE", ""),
        has_ray_token=_has_ray_token(),
    )


def _exempt() -> tuple[str, ...]:
    """Return what the first variable that names exempt hosts says, as gRPC takes it."""
    for name in (name for lower in _EXEMPTIONS for name in (lower, lower.upper())):
        if hosts := os.environ.get(name):
            return tuple(host.strip() for host in hosts.split(",") if host.strip())
    return ()


def _has_ray_token() -> bool:
    """Whether there is a token where Ray looks for one."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        return (Path(named) if named else Path.home() / _TOKEN_FILE).is_file()
    except (OSError, RuntimeError):  # no home is known
        return False
