"""The thread of an engine that is several: it obeys the dispatch table, and tells it what came.

    table, under its lock -> instructions, queued -> this thread: Ray is called
    Ray's threads: answered, ended, loaded -> table -> instructions

The base of ``engine.ReplicaEngine``, which has what the scorer calls. What the table says is queued
under its lock, so that it is obeyed in its order.
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

from teacher_logits_server.engines.passes import Outcome
from teacher_logits_server.replicas.actor import Refused, StoreFull
from teacher_logits_server.replicas.dispatch import Dispatch
from teacher_logits_server.replicas.endings import (
    RowsFailed,
    difference,
    lost_rows,
    refusal_of,
    store_full,
    words_of_end,
)
from teacher_logits_server.replicas.fleet import Sent
from teacher_logits_server.replicas.instructions import (
    Drop,
    Fail,
    Kill,
    Look,
    Patience,
    Send,
)
from teacher_logits_server.replicas.packing import pack, returned
from teacher_logits_server.replicas.staying import Staying

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ray import ObjectRef

    from teacher_logits.clock import Clock
    from teacher_logits_server.engines.answers import Part
    from teacher_logits_server.engines.passes import Scores
    from teacher_logits_server.replicas.actor import Loaded, Scored
    from teacher_logits_server.replicas.instructions import Instruction, Piece
    from teacher_logits_server.replicas.packing import PackedPart
    from teacher_logits_server.replicas.starting import Started

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ReplicaThread:
    """What is done for a ``ReplicaEngine``, and the events that it comes to."""

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
        self._staying = Staying(self._table, lock=self._lock, do=self._todo.put, clock=clock)
        self._closed = False
        self._thread = threading.Thread(target=self._live, name="replicas", daemon=True)
        self._thread.start()
        for number, loaded in enumerate(started.loaded):
            self._table.lies_on(number, loaded.node_id)
            self._watch(number, number)

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
        elif isinstance(told, Look):
            try:
                self._staying.look(self._nodes())
            except Exception:  # of Ray's; what there was room for before there is still
                _log.exception("the stores of the replicas' nodes could not be looked at")
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
        try:
            sent = self._fleet.score(told.life, packed)
        except Exception as error:  # what cannot even be called comes to the same as what fails
            sent = Sent(future=Future())
            sent.future.set_exception(error)
        stored = list(sent.stored)
        sent.future.add_done_callback(partial(self._on_scored, told, packed, stored))

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
        self,
        sent: Send,
        packed: Sequence[PackedPart],
        stored: list[ObjectRef[object]],
        future: Future[Scored],
    ) -> None:
        references = tuple(stored)
        stored.clear()  # whoever keeps the future keeps no object by it
        if self._closed:
            return
        error = future.exception()
        if isinstance(error, RayTaskError):
            self._answered(sent, error=RowsFailed(str(error)))
        elif error is not None:
            self._died(sent.replica, sent.life, error)
        elif isinstance(said := future.result(), StoreFull):
            self._answered(sent, error=store_full(said, node=sent.node), final=True)
        elif isinstance(said, str):
            self._answered(sent, error=RowsFailed(said))
        elif sent.node:
            rows = partial(self._staying.rows, sent, packed, said.statuses, references)
            self._answered(sent, rows)
        else:
            self._answered(sent, partial(returned, packed, said.data))

    def _answered(
        self,
        sent: Send,
        scores: Callable[[], tuple[Scores, ...]] | None = None,
        **outcome: object,
    ) -> None:
        with self._lock:
            used, todo = self._table.answered(
                sent.attempt, has_rows=scores is not None, now=self._clock.now()
            )
            self._todo.put(todo)
        if used:
            self._over(sent.pieces, scores=() if scores is None else scores(), **outcome)
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
                self._table.lies_on(replica, result.node_id)
                todo = self._table.started(replica, life, now=now)
            self._todo.put(todo)
        if why:
            facts = {"replica": replica, "life": life, "reason": why}
            _log.error("replica did not start", extra={"facts": self._whose | facts})
        else:
            self._watch(replica, life)
        self._changed()

    def _nodes(self) -> set[str]:
        return {each.node_id for each in self._loaded}
