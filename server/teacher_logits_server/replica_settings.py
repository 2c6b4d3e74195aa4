"""What a server is told of the replicas of its teacher; a group of ``settings``."""

# ruff: noqa: RUF009 - `_set` makes a dataclass field, which is no shared default

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from teacher_logits_server import readers
from teacher_logits_server.flags import setting as _set
from teacher_logits_server.flags import settings_of
from teacher_logits_server.ray_settings import RAY


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """replicas of the teacher (--engine ray)"""

    replicas: int = _set(
        1, "--replicas", readers.COUNT, "how many times the teacher runs, each for other batches"
    )
    replica_engine: str = _set(
        "transformers",
        "--replica-engine",
        readers.NAME,
        "what each replica runs, as --engine has it; --model and the other settings of the teacher "
        "are the replicas', and its files lie where they run",
    )
    replica_gpus: float = _set(
        0.0,
        "--replica-gpus",
        readers.AMOUNT,
        "GPUs that each replica holds; 0 is the CPU, 0.5 lets two share one",
    )
    replica_cpus: float = _set(
        1.0,
        "--replica-cpus",
        readers.AMOUNT,
        "CPUs that each replica holds, and threads of its arithmetic unless --threads says so",
    )
    placement: str = _set(
        "spread",
        "--placement",
        readers.choice("spread", "pack"),
        "replicas on as many machines as there are, or on as few as hold them",
    )
    replica_start: timedelta = _set(
        timedelta(minutes=10),
        "--replica-start",
        readers.SPAN,
        "longest that a replica may wait for its place and load its teacher",
    )
    replica_patience: timedelta = _set(
        timedelta(minutes=2),
        "--replica-patience",
        readers.SPAN,
        "a replica that has not answered this long after its request's deadline is started anew",
    )


class _Told(Protocol):
    """What the rules below need of a server's settings."""

    @property
    def engine_name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def device_pool_size_bytes(self) -> int: ...


def broken_rule(config: _Told) -> tuple[str, object, str] | None:
    """Return the first setting of replicas that makes no sense: its field, value, and the rule."""
    told: dict[str, object] = {
        name: getattr(config, name) for name, _, _ in settings_of(ReplicaSettings)
    }
    if config.engine_name != RAY:
        for name, default, _ in settings_of(ReplicaSettings):
            if (value := told[name]) != default:
                shown = readers.span_setting(value) if isinstance(value, timedelta) else value
                return name, shown, "is said of replicas, and --engine is not ray"
        return None
    return _of_numbers(told) or _of_the_teacher(config, told)


def _of_numbers(told: dict[str, object]) -> tuple[str, object, str] | None:
    replicas, cpus, gpus = (told[name] for name in ("replicas", "replica_cpus", "replica_gpus"))
    if isinstance(replicas, int) and replicas < 1:
        return "replicas", replicas, "must be at least 1"
    if not cpus and not gpus:
        return "replica_cpus", cpus, "must be more than 0 where a replica holds no GPU"
    for name in ("replica_start", "replica_patience"):
        span = told[name]
        if isinstance(span, timedelta) and span <= timedelta(0):
            return name, readers.span_setting(span), "must be longer than nothing"
    return None


def _of_the_teacher(config: _Told, told: dict[str, object]) -> tuple[str, object, str] | None:
    if told["replica_engine"] == RAY:
        return "replica_engine", RAY, "is what runs the replicas: name the engine that they run"
    if config.device.startswith("cuda") and not told["replica_gpus"]:
        rule = f"must be more than 0 for --device {config.device}, or the replicas see no GPU"
        return "replica_gpus", told["replica_gpus"], rule
    if config.device_pool_size_bytes:
        rule = "is memory of this server's own device, and its teacher runs in replicas: leave it"
        return "device_pool_size_bytes", config.device_pool_size_bytes, f"{rule} out"
    return None
