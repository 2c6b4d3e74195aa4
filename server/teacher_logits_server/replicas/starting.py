"""Bringing replicas up: places for all of them, actors in them, one teacher loaded by each.

Ray waits for resources for ever; here it waits until ``--replica-start``, and the refusal says
what was asked for and what there is. A teacher that one replica cannot load, or that is not the
one which the others have loaded, refuses the start with the number and the machine of that replica.
Whatever is refused leaves nothing behind in the cluster.
"""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from teacher_logits.clock import span_text
from teacher_logits.errors import ConfigError, EngineError
from teacher_logits_server.ray_address import AUTO
from teacher_logits_server.readers import span_setting
from teacher_logits_server.replicas.actor import Loaded, Refused
from teacher_logits_server.replicas.cluster import join
from teacher_logits_server.replicas.endings import difference, refusal_of, words_of_end
from teacher_logits_server.replicas.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from ray.util.placement_group import PlacementGroup

    from teacher_logits.clock import Clock
    from teacher_logits_server.config import ServerConfig

_log = logging.getLogger(__name__)
_RESOURCES = ("CPU", "GPU")


@dataclass(frozen=True, kw_only=True)
class Started:
    """Replicas that are ready: the first life of each, with the replica's own number."""

    fleet: Fleet
    loaded: tuple[Loaded, ...]


def start_replicas(config: ServerConfig, clock: Clock) -> Started:
    """Join the cluster and bring all replicas up: as long as that takes.

    Raises:
        ConfigError: no such cluster, no room there in time, or what the engine says of its flags.
        EngineError: a replica ended while it loaded its teacher.
        AlignmentError: what a replica loaded is not causal.
    """
    connection = join(address=config.ray_address or AUTO, namespace=config.ray_namespace)
    give_up = clock.now() + config.replica_start.total_seconds()
    try:
        places = _find_places(config, give_up - clock.now())
    except BaseException:
        connection.close()
        raise
    fleet = Fleet(config, connection=connection, places=places)
    try:
        loaded = load_all(config, fleet, clock=clock, give_up=give_up)
    except BaseException:
        fleet.close()
        raise
    for number, each in enumerate(loaded):
        facts = {"teacher_id": config.teacher_id, "replica": number, "node": each.node_id}
        facts |= {"host": each.host_name, "pid": each.pid}
        _log.info("replica ready", extra={"facts": facts})
    return Started(fleet=fleet, loaded=loaded)


def _find_places(config: ServerConfig, seconds: float) -> PlacementGroup:
    asked = {"CPU": config.replica_cpus, "GPU": config.replica_gpus}
    bundle = {name: amount for name, amount in asked.items() if amount}
    needs = {name: amount * config.replicas for name, amount in bundle.items()}
    there = ray.cluster_resources()
    if any(there.get(name, 0.0) < amount for name, amount in needs.items()):
        facts = {"asked": _text(needs), "there": _text(there)}
        _log.warning("the cluster is too small for the replicas; waiting", extra={"facts": facts})
    if there.get("GPU") and not config.replica_gpus:
        _log.warning("the cluster has GPUs, and --replica-gpus is 0: the teacher runs on CPUs")
    places: PlacementGroup = placement_group(
        [bundle] * config.replicas, strategy=config.placement.upper()
    )
    if places.wait(seconds):
        return places
    free, total = _text(ray.available_resources()), _text(ray.cluster_resources())
    remove_placement_group(places)
    raise ConfigError(
        f"--replicas {config.replicas}: there was no room for them in the Ray cluster within "
        f"{span_text(seconds)} (--replica-start). Each asks for {_text(bundle)}, all together for "
        f"{_text(needs)}; {free} of {total} are free: lower --replicas, --replica-gpus or "
        "--replica-cpus, or add nodes",
        facts={
            "flag": "--replicas",
            "value": config.replicas,
            "asked": _text(needs),
            "free": free,
            "total": total,
        },
    )


def _text(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in _RESOURCES)


class Beginning(Protocol):
    """What starts an actor; a ``Fleet``."""

    def begin(self, replica: int, life: int) -> Future[Loaded | Refused]:
        """Start one; the future brings what it has loaded."""


def load_all(
    config: ServerConfig, fleet: Beginning, *, clock: Clock, give_up: float
) -> tuple[Loaded, ...]:
    """Load them all, and return what each has: one teacher. The first that fails ends it.

    Raises:
        TeacherLogitsError: as ``start_replicas``.
    """
    futures = [fleet.begin(number, number) for number in range(config.replicas)]
    left = dict(zip(futures, range(config.replicas), strict=True))
    while left:
        patience = max(0.0, give_up - clock.now())
        done, _ = wait(left, timeout=patience, return_when=FIRST_COMPLETED)
        if not done:
            raise _late(config, sorted(left.values()))
        for future in done:
            number = left.pop(future)
            if (error := future.exception()) is not None:
                raise EngineError(
                    f"replica {number} ended while it loaded its teacher: {words_of_end(error)}",
                    facts={"replica": number, "error": type(error).__name__},
                ) from error
            result = future.result()
            if isinstance(result, Refused):
                raise refusal_of(result, number)
    loaded = tuple(each for each in (f.result() for f in futures) if isinstance(each, Loaded))
    for number, each in enumerate(loaded):
        if why := difference(loaded[0].profile, each.profile):
            raise _disagree(number, loaded[0], each, why)
    return loaded


def _late(config: ServerConfig, numbers: Sequence[int]) -> ConfigError:
    names = ", ".join(map(str, numbers))
    return ConfigError(
        f"--replica-start {span_setting(config.replica_start)}: replicas {names} had not loaded "
        "their teacher by then: allow more time, or look into Ray's logs of their workers",
        facts={
            "flag": "--replica-start",
            "value": config.replica_start.total_seconds(),
            "replicas": names,
        },
    )


def _disagree(number: int, first: Loaded, other: Loaded, why: str) -> ConfigError:
    return ConfigError(
        f"--model: replica 0 on {first.host_name} and replica {number} on {other.host_name} have "
        f"loaded different teachers ({why}): give all machines the same files, and the same "
        "releases of what loads them",
        facts={"flag": "--model", "replica": number, "difference": why},
    )
