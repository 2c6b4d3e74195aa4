"""What runs in a replica: one engine, loaded and probed as a server's own would be.

It computes one pass at a time, in the order in which they come. What it raises for rows is told
as text, which the server logs; it goes on after that. Rows that stay here are objects of its node's
store, a return value each, and what goes to the server is said beside them. ``stay`` is a call that
never returns: its end is how the server learns that the replica is gone, though nothing was asked
of it.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import ray

from teacher_logits.errors import ConfigError, EngineError, TeacherLogitsError
from teacher_logits_server.engines import check_settings, make_engine, words_of
from teacher_logits_server.engines.passes import PassEngine
from teacher_logits_server.engines.probe import probe_engine
from teacher_logits_server.exporters.ray_store import Store
from teacher_logits_server.flags import settings_of
from teacher_logits_server.ray_settings import of_no_teacher
from teacher_logits_server.replica_settings import ReplicaSettings
from teacher_logits_server.replicas.packing import compute, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.terms import Check
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines import Engine, EngineProfile
    from teacher_logits_server.replicas.packing import Bytes, PackedPart

ROOM_SECONDS = 2.0
"""How long rows that were computed wait for room in the store, and whatever comes behind them."""
WATCH = "watch"
"""The group of calls that ``stay`` runs in, beside the passes."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A teacher that a replica has loaded, and where that runs."""

    profile: EngineProfile
    check: Check
    node_id: str
    host_name: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Why a replica could not load its teacher, and where that was."""

    error: TeacherLogitsError
    host_name: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Returns:
    """What a pass has for the server: see ``packing.Computed``."""

    data: Bytes
    statuses: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StoreFull:
    """The node's store has no room for what was to stay there, whoever has filled it."""

    need_bytes: int
    used_bytes: int
    most_bytes: int


Scored: TypeAlias = "Returns | StoreFull | str"


class ReplicaActor:
    """One replica; an actor's class."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._store: Store | None = None

    def load(self, config: ServerConfig) -> Loaded | Refused:
        """Load and probe the teacher."""
        try:
            own = of_a_replica(config)
            check_settings(own)
            engine = make_engine(own)
            if isinstance(engine, PassEngine):
                raise ConfigError(
                    f"--replica-engine {own.engine}: computes elsewhere itself; name one that "
                    "computes where it is made",
                    facts={"flag": "--replica-engine", "value": own.engine},
                )
            check = probe_engine(engine)
        except TeacherLogitsError as error:
            return Refused(error=_of_replicas(error), host_name=socket.gethostname())
        except Exception as error:
            said = EngineError(f"the teacher did not load: {words_of(error)}")
            return Refused(error=said, host_name=socket.gethostname())
        self._engine = engine
        return Loaded(
            profile=engine.profile,
            check=check,
            node_id=ray.get_runtime_context().get_node_id(),
            host_name=socket.gethostname(),
            pid=os.getpid(),
        )

    def score(self, parts: Sequence[PackedPart]) -> Scored | tuple[Scored | Bytes | None, ...]:
        """Compute a pass, or return what was raised instead.

        Behind what goes to the server come the rows that stay, an object for each such part.
        """
        staying = sum(part.is_stored for part in parts)
        scored, stored = self._score(parts)
        return (scored, *stored, *[None] * (staying - len(stored))) if staying else scored

    def _score(self, parts: Sequence[PackedPart]) -> tuple[Scored, tuple[Bytes, ...]]:
        if self._engine is None:
            return "the replica has loaded no teacher", ()
        try:
            computed = compute(self._engine, parts)
            if computed.stored and (full := self._await_room(size_of(parts, is_stored=True))):
                return full, ()
        except Exception:
            return traceback.format_exc(), ()
        return Returns(data=computed.returned, statuses=computed.statuses), computed.stored

    def _await_room(self, size_bytes: int) -> StoreFull | None:
        """Wait until this node's store has room below its threshold, but not for long."""
        if self._store is None:
            self._store = Store()
        used = self._store.await_room(size_bytes, seconds=ROOM_SECONDS)
        if used is None:
            self._store.note_put(size_bytes)
            return None
        return StoreFull(need_bytes=size_bytes, used_bytes=used, most_bytes=self._store.most_bytes)

    @ray.method(concurrency_group=WATCH)
    def stay(self) -> None:
        """Never return."""
        threading.Event().wait()


def _of_replicas(error: TeacherLogitsError) -> TeacherLogitsError:
    """Return what an engine's making is refused with, naming the flag that was given."""
    if error.facts.get("flag") != "--engine":
        return error
    flag = "--replica-engine"
    return type(error)(error.message.replace("--engine", flag), facts={**error.facts, "flag": flag})


def of_a_replica(config: ServerConfig) -> ServerConfig:
    """Return a server's settings as its replicas load their engine by them."""
    engine = config.replica_engine
    defaults = {name: default for name, default, _ in settings_of(ReplicaSettings)}
    own = {"engine": engine, **defaults, **of_no_teacher(engine)}
    return replace(config, **own)  # type: ignore[arg-type]
