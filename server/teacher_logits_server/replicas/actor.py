"""What runs in a replica: one engine, loaded and probed as a server's own would be.

It computes one pass at a time, in the order in which they come. What it raises for rows is told
as text, which the server logs; it goes on after that. ``stay`` is a call that never returns: its
end is how the server learns that the replica is gone, though nothing was asked of it.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ray

from teacher_logits.errors import ConfigError, EngineError, TeacherLogitsError
from teacher_logits_server.engines import check_settings, make_engine, words_of
from teacher_logits_server.engines.passes import PassEngine
from teacher_logits_server.engines.probe import probe_engine
from teacher_logits_server.flags import settings_of
from teacher_logits_server.ray_settings import of_no_teacher
from teacher_logits_server.replica_settings import ReplicaSettings
from teacher_logits_server.replicas.packing import compute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.terms import Check
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines import Engine, EngineProfile
    from teacher_logits_server.replicas.packing import Bytes, PackedPart

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


class ReplicaActor:
    """One replica; an actor's class."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

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

    def score(self, parts: Sequence[PackedPart]) -> Bytes | str:
        """Compute a pass; return its columns, or what was raised instead."""
        if self._engine is None:
            return "the replica has loaded no teacher"
        try:
            return compute(self._engine, parts)
        except Exception:
            return traceback.format_exc()

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
