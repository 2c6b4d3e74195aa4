"""The engine that is several: passes given to replicas, and what they come to.

    scorer's thread   start -> dispatch table -> instructions --+
    Ray's threads     answered, ended, loaded -> table ---------+--> the replicas' own thread,
    this thread       deadlines -> table -----------------------+    which obeys them

The table has one short lock, never held across a call to Ray; what it says is queued under that
lock, so that it is obeyed in its order. Nothing here computes or writes
into an answer: that is the replicas' and the scorer's.
"""

from __future__ import annotations

import logging
import queue
import threading
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from ray.exceptions import RayTaskError

from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import EngineError
from teacher_logits_server.engines.passes import Outcome
from teacher_logits_server.replicas.actor import Refused
from teacher_logits_server.replicas.dispatch import Dispatch
from teacher_logits_server.replicas.endings import (
    RowsFailed,
    difference,
    lost_rows,
    nobody_up,
    refusal_of,
    words_of_end,
)
from teacher_logits_server.replicas.instructions import (
    Drop,
    Fail,
    Kill,
    Patience,
    Piece,
    Send,
)
from teacher_logits_server.replicas.packing import pack, returned
from teacher_logits_server.replicas.starting import start_replicas
from teacher_logits_server.replicas.views import view_replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.clock import Clock
    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits.terms import Check
    from teacher_logits.views import ReplicaView
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines import EngineProfile
    from teacher_logits_server.engines.answers import Part
    from teacher_logits_server.replicas.actor import Loaded
    from teacher_logits_server.replicas.instructions import Instruction
    from teacher_logits_server.replicas.packing import Bytes, PackedPart
    from teacher_logits_server.replicas.starting import Started

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ReplicaEngine:
    """An engine over replicas; a ``PassEngine``. ``close`` ends them."""

    def __init__(
        self, started: Started, *, patience: Patience, clock: Clock, teacher_id: str = ""
    ) -> None:
        self._fleet, self._whose = started.fleet, {"teacher_id": teacher_id}
        self._clock = clock
        self._lock = threading.Lock()
        self._table = Dispatch(replica_count=len(started.loaded), patience=patience)
        self._loaded = list(started.loaded)
        self._profile, self._check = started.loaded[0].profile, started.loaded[0].check
        self._keys = count()
        self._parts: dict[int, tuple[Part, Callable[[], bool]]] = {}
        self._outcomes: list[Outcome] = []
        self._changed: Callable[[], None] = lambda: None
        self._todo: queue.SimpleQueue[list[Instruction] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._live, name="replicas", daemon=True)
        self._thread.start()
        for number in range(len(started.loaded)):
            self._watch(number, number)

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
        """See ``Passes``."""
        pieces = [Piece(key=next(self._keys), tokens=part.token_count) for part in parts]
        with self._lock:
            for piece, part in zip(pieces, parts, strict=True):
                self._parts[piece.key] = part, wanted
            self._todo.put(self._table.add(pieces, deadline=deadline, now=self._clock.now()))

    def outcomes(self) -> list[Outcome]:
        """See ``Passes``."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
            return outcomes

    def on_change(self, callback: Callable[[], None]) -> None:
        """See ``Passes``."""
        self._changed = callback

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

    # The replicas' thread

    def _live(self) -> None:
        try:
            while (todo := self._next()) is not None:
                for each in todo:
                    self._obey(each)
        except BaseException:
            _log.critical("the replicas' thread died", exc_info=True)
            raise
        finally:
            self._changed()

    def _next(self) -> list[Instruction] | None:
        with self._lock:
            due = self._table.next_due
        patience = None if due is None else max(0.0, due - self._clock.now())
        try:
            return self._todo.get(timeout=patience)
        except queue.Empty:
            with self._lock:
                self._todo.put(self._table.tick(self._clock.now()))
            return self._todo.get()

    def _obey(self, told: Instruction) -> None:
        if isinstance(told, Send):
            self._send(told)
        elif isinstance(told, Drop):
            self._over(told.pieces, unwanted=True)
        elif isinstance(told, Fail):
            self._over(told.pieces, error=lost_rows(told), final=True)
        elif isinstance(told, Kill):
            _log.info("replica is ended", extra={"facts": self._whose | asdict(told)})
            self._fleet.end(told.life)
        else:
            _log.info("replica starts anew", extra={"facts": self._whose | asdict(told)})
            loaded = partial(self._on_loaded, told.replica, told.life)
            self._call(lambda: self._fleet.begin(told.replica, told.life), loaded)

    def _send(self, told: Send) -> None:
        with self._lock:
            given = [self._parts[piece.key] for piece in told.pieces]
        if not any(wanted() for _, wanted in given):
            self._answered(told, unwanted=True)
            return
        packed = [pack(part) for part, _ in given]
        scored = partial(self._on_scored, told, packed)
        self._call(lambda: self._fleet.score(told.life, packed), scored)

    def _call(self, call: Callable[[], Future[T]], then: Callable[[Future[T]], None]) -> None:
        """Call a replica; what cannot even be called comes to the same as what fails."""
        try:
            future = call()
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(then)

    def _over(self, pieces: Sequence[Piece], **outcome: object) -> None:
        with self._lock:
            parts = tuple(self._parts.pop(piece.key)[0] for piece in pieces)
            self._outcomes.append(Outcome(parts=parts, **outcome))  # type: ignore[arg-type]
        self._changed()

    # Events, on threads of Ray's

    def _on_scored(
        self, sent: Send, packed: Sequence[PackedPart], future: Future[Bytes | str]
    ) -> None:
        if self._closed:
            return
        error = future.exception()
        if isinstance(error, RayTaskError):
            self._answered(sent, error=RowsFailed(str(error)))
        elif error is not None:
            self._died(sent.replica, sent.life, error)
        elif isinstance(said := future.result(), str):
            self._answered(sent, error=RowsFailed(said))
        else:
            self._answered(sent, scores=returned(packed, said))

    def _answered(self, sent: Send, **outcome: object) -> None:
        with self._lock:
            used, todo = self._table.answered(sent.attempt, now=self._clock.now())
            self._todo.put(todo)
        if used:
            self._over(sent.pieces, **outcome)
        self._changed()

    def _died(self, replica: int, life: int, error: BaseException) -> None:
        why = words_of_end(error)
        with self._lock:
            if not self._table.replica(replica).is_in(life):
                return  # it was told before
            todo = self._table.died(replica, life, reason=why, now=self._clock.now())
            self._todo.put([Kill(replica=replica, life=life), *todo])
        facts = {"replica": replica, "life": life, "reason": why}
        _log.warning("replica ended", extra={"facts": self._whose | facts})
        self._changed()

    def _watch(self, replica: int, life: int) -> None:
        def on_end(future: Future[None]) -> None:
            if not self._closed and (error := future.exception()) is not None:
                self._died(replica, life, error)

        self._call(lambda: self._fleet.watch(life), on_end)

    def _on_loaded(self, replica: int, life: int, future: Future[Loaded | Refused]) -> None:
        if self._closed:
            return
        error = future.exception()
        result = None if error is not None else future.result()
        if isinstance(result, Refused):
            why = refusal_of(result, replica).message
        elif result is None:
            why = words_of_end(error) if error is not None else "it loaded nothing"
        elif why := difference(self._profile, result.profile):
            why = f"it loaded another teacher than before: {why}"
        with self._lock:
            now = self._clock.now()
            if result is None or isinstance(result, Refused) or why:
                todo = self._table.start_failed(replica, life, reason=why, now=now)
                todo = [Kill(replica=replica, life=life), *todo]
            else:
                self._loaded[replica] = result
                todo = self._table.started(replica, life, now=now)
            self._todo.put(todo)
        if why:
            facts = {"replica": replica, "life": life, "reason": why}
            _log.error("replica did not start", extra={"facts": self._whose | facts})
        else:
            self._watch(replica, life)
        self._changed()


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
