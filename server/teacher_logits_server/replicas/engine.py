"""The engine that is several: passes given to replicas, and what they come to.

    scorer's thread   start -> dispatch table -> instructions --+
    Ray's threads     answered, ended, loaded -> table ---------+--> the replicas' own thread,
    this thread       deadlines -> table -----------------------+    which obeys them

The table has one short lock, never held across a call to Ray; what it says is queued under that
lock, so that it is obeyed in its order. Nothing here computes or writes
into an answer: that is the replicas' and the scorer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import EngineError
from teacher_logits_server.replicas.endings import nobody_up
from teacher_logits_server.replicas.instructions import Patience
from teacher_logits_server.replicas.packing import piece_of
from teacher_logits_server.replicas.starting import start_replicas
from teacher_logits_server.replicas.thread import ReplicaThread
from teacher_logits_server.replicas.views import view_replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits.terms import Check
    from teacher_logits.views import ReplicaView
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines import EngineProfile
    from teacher_logits_server.engines.answers import Part
    from teacher_logits_server.engines.passes import Outcome
    from teacher_logits_server.engines.stored import NodeStores


class ReplicaEngine(ReplicaThread):
    """An engine over replicas; a ``PassEngine``. ``close`` ends them."""

    @property
    def profile(self) -> EngineProfile:
        """See ``PassEngine``; all replicas have the same."""
        return self._profile

    @property
    def check(self) -> Check:
        """See ``PassEngine``; the first replica's, and the others passed too."""
        return self._check

    @property
    def is_alive(self) -> bool:
        """See ``PassEngine``."""
        return self._thread.is_alive()

    @property
    def room(self) -> int:
        """See ``Passes``."""
        with self._lock:
            return self._table.room

    @property
    def refusal(self) -> TeacherLogitsError | None:
        """See ``Passes``."""
        if not (self._closed or self._thread.is_alive()):
            return EngineError("the replicas' thread died: restart the server; its log says why")
        with self._lock:
            reason = self._table.refusal
        return None if reason is None else nobody_up(reason)

    def start(self, parts: Sequence[Part], *, wanted: Callable[[], bool], deadline: float) -> None:
        """See ``Passes``. What stays is a pass of its own: others do not wait for its room."""
        pieces = [piece_of(part, key=next(self._keys)) for part in parts]
        with self._lock:
            for piece, part in zip(pieces, parts, strict=True):
                self._parts[piece.key] = part, wanted
            for stays in (False, True):
                if given := [each for each in pieces if bool(each.stored_bytes) is stays]:
                    now = self._clock.now()
                    self._todo.put(self._table.add(given, deadline=deadline, now=now))

    def outcomes(self) -> list[Outcome]:
        """See ``Passes``."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def on_change(self, callback: Callable[[], None]) -> None:
        """See ``Passes``."""
        self._changed = callback

    def may_stay(self, size_bytes: int) -> bool:
        """See ``Passes``."""
        return self._staying.suits(size_bytes)

    def promise_room(self, size_bytes: int) -> Callable[[], None]:
        """See ``Passes``."""
        return self._staying.promise(size_bytes)

    def use_stores(self, stores: NodeStores, *, sharers: int) -> None:
        """Have what sessions read as objects stay on its node; ``sharers`` engines share them."""
        self._staying.use(stores, sharers=sharers)
        self._staying.look(self._nodes())

    def store_use(self) -> dict[str, tuple[int, int]]:
        """Return of each node what stays there, in bytes, and its budget."""
        return self._staying.used()

    def replicas(self) -> tuple[ReplicaView, ...]:
        """See ``PassEngine``."""
        with self._lock:
            return view_replicas(self._table, self._loaded)

    def close(self) -> None:
        """See ``PassEngine``."""
        if self._closed:
            return
        self._closed = True
        self._todo.put(None)
        self._thread.join()
        self._fleet.close()


def from_config(config: ServerConfig) -> ReplicaEngine:
    """Bring up the replicas that a server was told to serve with.

    Raises:
        TeacherLogitsError: as ``start_replicas``.
    """
    clock = MonotonicClock()
    patience = Patience(
        start=config.replica_start.total_seconds(), answer=config.replica_patience.total_seconds()
    )
    started = start_replicas(config, clock)
    return ReplicaEngine(started, patience=patience, clock=clock, teacher_id=config.teacher_id)
