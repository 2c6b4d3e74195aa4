"""The fleet: the actors of the replicas, their places in the cluster, and calls to them.

Places are a placement group: what replicas hold is theirs while the server lives, so that one
that is started anew finds its GPU free. A replica's life is one actor. Nothing here is detached:
whatever ends this process ends the actors, and frees their places.

Methods may be called from any thread and wait for nobody, but for ``close``; what a call comes to
is told by its future, on a thread of Ray's.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from teacher_logits import keys
from teacher_logits_server.replicas.actor import WATCH, ReplicaActor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.replicas.actor import Loaded, Refused, Scored
    from teacher_logits_server.replicas.cluster import Connection
    from teacher_logits_server.replicas.packing import PackedPart

    class Method(Protocol):
        """A method of an actor, called where that is."""

        def remote(self, *given: object) -> ray.ObjectRef[object]:
            """Call it."""

    class ManyReturns(Protocol):
        """A method whose values are an object each."""

        def remote(self, *given: object) -> list[ray.ObjectRef[object]]:
            """Call it."""

    class ScoreMethod(Method, Protocol):
        """One that has as many return values as it is told."""

        def options(self, *, num_returns: int) -> ManyReturns:
            """Return it with so many, two or more."""

    class Handle(Protocol):
        """A ``ReplicaActor`` somewhere."""

        load: Method
        score: ScoreMethod
        stay: Method

    class ActorClass(Protocol):
        """What makes them."""

        def remote(self) -> Handle:
            """Make one."""

    class Decorate(Protocol):
        """``ray.remote``, as it is used here."""

        def __call__(self, **options: object) -> Callable[[type], ActorClass]:
            """Return what makes an actor of a class, with these options."""


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sent:
    """A pass that is being computed.

    ``stored`` are the references of its rows that stay, in the order of their parts: the objects
    are this process's own, and lie in the store of the replica's node.
    """

    future: Future[Scored]
    stored: tuple[ray.ObjectRef[object], ...] = ()


class Fleet:
    """The actors of one teacher's replicas, by the numbers of their lives."""

    def __init__(
        self, config: ServerConfig, *, connection: Connection, places: PlacementGroup
    ) -> None:
        self._config = config
        self._connection = connection
        self._places = places
        self._name = f"teacher-logits/{config.teacher_id}/{keys.new_epoch()}"
        self._actors: dict[int, Handle] = {}

    def begin(self, replica: int, life: int) -> Future[Loaded | Refused]:
        """Start an actor in a replica's place; the future brings what it has loaded."""
        options = {
            "name": f"{self._name}/{replica}/{life}",
            "num_cpus": self._config.replica_cpus,
            "num_gpus": self._config.replica_gpus,
            "max_restarts": 0,
            "max_concurrency": 1,
            "concurrency_groups": {WATCH: 1},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._places, placement_group_bundle_index=replica
            ),
        }
        make = cast("Decorate", ray.remote)(**options)
        self._actors[life] = make(ReplicaActor).remote()
        return _future(self._actors[life].load.remote(self._config))

    def watch(self, life: int) -> Future[None]:
        """Return a future that fails when a life ends."""
        return _future(self._actors[life].stay.remote())

    def score(self, life: int, parts: Sequence[PackedPart]) -> Sent:
        """Have a pass computed.

        Raises:
            KeyError: that life has ended.
        """
        method, staying = self._actors[life].score, sum(part.is_stored for part in parts)
        if not staying:
            return Sent(future=_future(method.remote(list(parts))))
        first, *rest = method.options(num_returns=1 + staying).remote(list(parts))
        return Sent(future=_future(first), stored=tuple(rest))

    def end(self, life: int) -> None:
        """End a life, if it has not ended."""
        actor = self._actors.pop(life, None)
        if actor is not None:
            with suppress(ValueError):  # it is gone already
                ray.kill(cast("ActorHandle[ReplicaActor]", actor))

    def close(self) -> None:
        """End all of them, free their places, and leave the cluster."""
        for life in list(self._actors):
            self.end(life)
        remove_placement_group(self._places)
        self._connection.close()


def _future(reference: ray.ObjectRef[object]) -> Future[T]:
    return cast("Future[T]", reference.future())
