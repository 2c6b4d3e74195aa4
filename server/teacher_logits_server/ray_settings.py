"""What a server is told of a Ray cluster; a group of ``settings``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from teacher_logits.transport import Transport
from teacher_logits_server import readers
from teacher_logits_server.flags import setting as _set
from teacher_logits_server.flags import settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RAY = "ray"
"""The engine that is replicas in the cluster, each of which runs another."""
LEAST_BUDGET_BYTES = 4096
_NAMESPACE = "teacher-logits"


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
        _NAMESPACE,
        "--ray-namespace",
        readers.NAME,
        "namespace of the server's actors, for `ray list actors`",
    )
    ray_budget_bytes: int = _set(
        0,
        "--ray-budget",
        readers.SIZE,
        "most bytes of payloads in the object store of this node, and of each node with replicas; "
        "0 is half of it, and three tenths; whoever finds no room waits, or is streamed to",
    )


def of_no_teacher(engine_name: str) -> dict[str, object]:
    """Return what one teacher's settings have in place of the server's: fields and values.

    How payloads go out is the server's affair alone, and a cluster that of engines that are
    replicas there: rules about them are the server's, and break for none of its teachers.
    """
    told = ("ray_address", "ray_namespace") if engine_name == RAY else ()
    defaults = {name: each for name, each, _ in settings_of(RaySettings) if name not in told}
    return {"transports": tuple(Transport), **defaults}


class _Named(Protocol):
    """One of several teachers."""

    @property
    def settings(self) -> Mapping[str, object]: ...


class _Told(Protocol):
    """What the rule below needs of a server's settings."""

    @property
    def engine_name(self) -> str: ...
    @property
    def ray_address(self) -> str: ...
    @property
    def ray_namespace(self) -> str: ...
    @property
    def ray_budget_bytes(self) -> int: ...
    @property
    def transports(self) -> tuple[Transport, ...]: ...
    @property
    def teachers(self) -> Sequence[_Named]: ...


def broken_rule(config: _Told) -> tuple[str, object, str] | None:
    """Return the first setting of a cluster that makes no sense: its field, value, and the rule."""
    budget, namespace = config.ray_budget_bytes, config.ray_namespace
    has_replicas = RAY in (config.engine_name, *(t.settings.get("engine") for t in config.teachers))
    if not config.ray_address:
        if budget:
            rule = "is memory of a Ray cluster, and no --ray-address names one"
            return "ray_budget_bytes", budget, rule
        if Transport.RAY_OBJECT in config.transports and set(config.transports) != set(Transport):
            rule = "needs --ray-address, the cluster in whose store payloads are put"
            return "transports", Transport.RAY_OBJECT.value, rule
        if not has_replicas:
            rule = f"is of a Ray cluster, and neither --ray-address nor --engine {RAY} is given"
            return ("ray_namespace", namespace, rule) if namespace != _NAMESPACE else None
    if not namespace:
        return "ray_namespace", "", "must be a name, under which readers look"
    if Transport.RAY_OBJECT not in config.transports:
        if config.ray_address and not has_replicas:
            rule = (
                f"is joined for ray_object and --engine {RAY} alone: have the one among "
                "--transports, or the other"
            )
            return "ray_address", config.ray_address, rule
        if budget:
            rule = "is for payloads of ray_object, which is not among --transports: leave it out"
            return "ray_budget_bytes", budget, rule
    if budget and budget < LEAST_BUDGET_BYTES:
        rule = f"must be 0, for half of the store, or at least {LEAST_BUDGET_BYTES}"
        return "ray_budget_bytes", budget, rule
    return None
