"""Ray on this machine: which release, whether its cluster answers, and by which token.

Ray itself is not imported, and nothing is asked of the cluster but whether somebody listens.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_logits_client.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from teacher_logits.errors import Fact
    from teacher_logits_client.doctor.config import Surroundings

OLDEST = (2, 40)
_CURRENT = Path("/tmp/ray/ray_current_cluster")
"""Where Ray writes the address of the cluster that was started last on this machine."""
_CONNECT_SECONDS = 1.0
_CLIENT_SCHEME = "ray://"
_VARIABLE = "RAY_ADDRESS"


@dataclass(frozen=True, kw_only=True)
class Ray:
    """What is seen of Ray. ``source`` is who names ``address``; ``said`` why nobody answers."""

    version: str = ""
    address: str = ""
    source: str = ""
    answers: bool = False
    said: str = ""
    auth_mode: str = ""
    has_token: bool = False


def look_at_ray(surroundings: Surroundings, *, current: Path = _CURRENT) -> Ray:
    """Look for Ray and a cluster, and try whether somebody listens there."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        version = ""
    address, source = surroundings.ray_address, _VARIABLE
    if address in ("", "auto"):
        address, source = _read(current), str(current)
    said = "" if not address else _why_silent(address)
    return Ray(
        version=version,
        address=address,
        source=source if address else "",
        answers=bool(address) and not said,
        said=said,
        auth_mode=surroundings.ray_auth_mode,
        has_token=surroundings.has_ray_token,
    )


def ray_findings(ray: Ray) -> list[Finding]:
    """Judge Ray; its cluster and token only where there is Ray."""
    if not ray.version:
        return [
            Finding(
                name="ray",
                verdict=Verdict.OK,
                message="not installed: no payloads through Ray's object store (ray_object); "
                "pip install 'teacher-logits[ray]' brings it",
            )
        ]
    return [version_finding(ray.version), cluster_finding(ray), auth_finding(ray)]


def version_finding(version: str) -> Finding:
    """Judge a release of Ray."""
    numbers = [int(part) if part.isdecimal() else 0 for part in version.split(".")[:2]]
    is_old = tuple(numbers) < OLDEST
    oldest = ".".join(map(str, OLDEST))
    return Finding(
        name="ray",
        verdict=Verdict.WARN if is_old else Verdict.OK,
        message=f"Ray {version}" + (f" is older than {oldest}" if is_old else ""),
        cure=f"pip install 'ray>={oldest}', the same release on every node" if is_old else "",
        facts={"version": version},
    )


def cluster_finding(ray: Ray) -> Finding:
    """Judge whether the cluster that is named answers."""
    facts: dict[str, Fact] = {"address": ray.address, "source": ray.source, "answers": ray.answers}
    if not ray.address:
        message = "no cluster is named (RAY_ADDRESS), and none was started here"
        return Finding(name="ray_cluster", verdict=Verdict.OK, message=message, facts=facts)
    if ray.answers:
        message = f"somebody listens at {ray.address} ({ray.source})"
        return Finding(name="ray_cluster", verdict=Verdict.OK, message=message, facts=facts)
    if ray.source != _VARIABLE:
        message = f"{ray.address} ({ray.source}) is of a cluster that is gone: {ray.said}"
        return Finding(name="ray_cluster", verdict=Verdict.OK, message=message, facts=facts)
    is_client = ray.address.startswith(_CLIENT_SCHEME)
    return Finding(
        name="ray_cluster",
        verdict=Verdict.WARN,
        message=f"{ray.address} ({ray.source}): {ray.said}",
        cure="give host:port of the cluster itself, and run in a node of it: Ray Client has no "
        "object store"
        if is_client
        else "start the cluster (ray start), or unset RAY_ADDRESS",
        facts=facts,
    )


def auth_finding(ray: Ray) -> Finding:
    """Judge whether mode and token of authentication go together."""
    facts: dict[str, Fact] = {"mode": ray.auth_mode, "has_token": ray.has_token}
    has = "a token" if ray.has_token else "no token"
    if ray.auth_mode == "token" and not ray.has_token:
        return Finding(
            name="ray_auth",
            verdict=Verdict.WARN,
            message="RAY_AUTH_MODE=token, and there is no token: no cluster can be joined",
            cure="put the cluster's token in ~/.ray/auth_token, or name its file by "
            "RAY_AUTH_TOKEN_PATH",
            facts=facts,
        )
    if ray.has_token and not ray.auth_mode:
        message = (
            "there is a token, and RAY_AUTH_MODE is not set: a cluster started with it is joined "
            "by auto, and by host:port only with RAY_AUTH_MODE=token"
        )
    else:
        message = f"RAY_AUTH_MODE is {ray.auth_mode or 'not set'}, and there is {has}"
    return Finding(name="ray_auth", verdict=Verdict.OK, message=message, facts=facts)


def _why_silent(address: str) -> str:
    """Say why nobody can be reached at an address of Ray's; empty where somebody listens."""
    if address.startswith(_CLIENT_SCHEME):
        return "is Ray Client's"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return "is no host:port"
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        return f"nobody listens there ({getattr(error, 'strerror', None) or error})"
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
