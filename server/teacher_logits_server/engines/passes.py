"""Passes: how the scorer's thread has rows computed, by an engine here or by several elsewhere.

    start(parts) -> computed, here or elsewhere -> outcomes: parts that are written, or have failed

Most engines compute here, one pass at a time, on the thread that asks (``OneAtATime``). A
``PassEngine`` computes elsewhere and on several passes at once, as many as it has ``room`` for;
their outcomes come in any order, and some parts of a pass may come before the others.

Promises: every part that was started has one outcome, unless the engine is closed before.
Nothing but ``outcomes`` and ``Scores.copy_to`` writes into an answer, on the caller's thread:
room that was given back in between is not touched.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from teacher_logits_server.engines.answers import fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits.terms import Check
    from teacher_logits.views import ReplicaView
    from teacher_logits_server.engines import Engine, EngineProfile
    from teacher_logits_server.engines.answers import Asked, Part
    from teacher_logits_server.engines.stored import NodeStores

    ServedEngine: TypeAlias = "Engine | PassEngine"


class Scores(Protocol):
    """What was computed elsewhere for one part: its columns, or where they stay."""

    def copy_to(self, part: Part) -> None:
        """Write it where the part's rows belong, or have their answer keep what stays.

        Raises:
            ValueError: it is not what was asked for.
        """

    def drop(self) -> None:
        """Let go of what nobody wants."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Parts whose pass is over.

    ``error`` is what the engine raised on them together; it is ``final`` where trying them again,
    each alone, is of no use. ``scores`` has one entry a part where they are still to be written;
    it is empty where they are. Of what is ``unwanted`` nothing was written: nobody waits for it.
    """

    parts: tuple[Part, ...]
    error: Exception | None = None
    final: bool = False
    scores: tuple[Scores, ...] = ()
    unwanted: bool = False


class Passes(Protocol):
    """What the scorer gives its passes to."""

    @property
    def room(self) -> int:
        """How many passes may be started now."""

    @property
    def refusal(self) -> TeacherLogitsError | None:
        """Why nothing can be computed at present; None where it can."""

    def start(self, parts: Sequence[Part], *, wanted: Callable[[], bool], deadline: float) -> None:
        """Have the rows of some answers computed together.

        More than there is room for wait their turn. ``wanted`` may be asked on any thread; from
        ``deadline`` on, by the server's clock, nobody wants them.
        """

    def outcomes(self) -> list[Outcome]:
        """Return what is over since the last call; perhaps compute it first."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on any thread, when there are outcomes or more room."""

    def may_stay(self, size_bytes: int) -> bool:
        """Say whether a payload of so many bytes may stay where it is computed (``stored``)."""

    def promise_room(self, size_bytes: int) -> Callable[[], None]:
        """Promise room for one that stays; return what gives it back, to be called once.

        Raises:
            PoolFullError: there is none now.
        """


@runtime_checkable
class PassEngine(Passes, Protocol):
    """An engine that computes whole passes elsewhere; the scorer never sees its logits."""

    @property
    def profile(self) -> EngineProfile:
        """Return what the engine says of its teacher; the same for as long as it lives."""

    @property
    def check(self) -> Check:
        """Return what the causality probe said, wherever the teacher computes."""

    @property
    def is_alive(self) -> bool:
        """Whether its own thread lives."""

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Describe where it computes."""

    def use_stores(self, stores: NodeStores, *, sharers: int) -> None:
        """Have what sessions read as objects stay where it is computed; once, before the first.

        So many engines have a part each of what the stores have room for. Waits for them.
        """

    def store_use(self) -> dict[str, tuple[int, int]]:
        """Return of each node the bytes that stay there, and how many may."""

    def close(self) -> None:
        """Give everything back. What was started and is not over is lost."""


class OneAtATime:
    """The passes of an engine that computes here, on the thread that asks for outcomes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._started: deque[tuple[tuple[Part, ...], Callable[[], bool]]] = deque()

    @property
    def room(self) -> int:
        """See ``Passes``."""
        return 0 if self._started else 1

    @property
    def refusal(self) -> TeacherLogitsError | None:
        """See ``Passes``."""
        return None

    def start(self, parts: Sequence[Part], *, wanted: Callable[[], bool], deadline: float) -> None:
        """See ``Passes``; computed by ``outcomes``."""
        self._started.append((tuple(parts), wanted))

    def outcomes(self) -> list[Outcome]:
        """Compute the next pass, if there is one, and return what became of it."""
        if not self._started:
            return []
        parts, wanted = self._started.popleft()
        try:
            while wanted():
                if fill(self._engine, parts, wanted=wanted):
                    return [Outcome(parts=parts)]
        except Exception as error:
            return [Outcome(parts=parts, error=error)]
        return [Outcome(parts=parts, unwanted=True)]

    def on_change(self, callback: Callable[[], None]) -> None:
        """Do nothing: whoever asks for outcomes is the one that computes them."""

    def may_stay(self, size_bytes: int) -> bool:
        """See ``Passes``; what is computed here is written here."""
        return False

    def promise_room(self, size_bytes: int) -> Callable[[], None]:
        """See ``Passes``.

        Raises:
            ValueError: nothing stays anywhere.
        """
        raise ValueError("what this engine computes stays nowhere")


def passes_of(engine: ServedEngine) -> Passes:
    """Return what the scorer gives an engine's passes to."""
    return engine if isinstance(engine, PassEngine) else OneAtATime(engine)


@contextmanager
def closed_on_failure(*engines: ServedEngine) -> Iterator[None]:
    """Close the engines that compute elsewhere if what follows fails; others need no closing."""
    try:
        yield
    except BaseException:
        for engine in engines:
            if isinstance(engine, PassEngine):
                engine.close()
        raise


def is_for(answer: Asked | None, part: Part) -> bool:
    """Say whether a part belongs to an answer that still has its room."""
    return answer is not None and part.answer is answer
