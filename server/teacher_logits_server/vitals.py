"""Vitals: which threads of a server live, and which of its own teachers are able."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.views import ReplicaView
    from teacher_logits_server.broker import Broker
    from teacher_logits_server.engines.passes import PassEngine
    from teacher_logits_server.scorer import Scorer


class Vitals:
    """Looks at a core's parts.

    Args:
        scorers: of the server's own teachers, by teacher id.
        passes: the engines of those that run in replicas, likewise.
        broker: the broker, if there is one.
    """

    def __init__(
        self,
        *,
        scorers: Mapping[str, Scorer],
        passes: Mapping[str, PassEngine],
        broker: Broker | None,
    ) -> None:
        self._scorers = scorers
        self._passes = passes
        self._broker = broker

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Describe the replicas of the teachers that run in some."""
        return tuple(
            replace(each, teacher_id=teacher_id)
            for teacher_id, passes in self._passes.items()
            for each in passes.replicas()
        )

    def health(self) -> dict[str, str | bool]:
        """Return what the health is made of, for the log: teachers stand in no name of a fact."""
        facts: dict[str, str | bool] = {}
        if self._broker is not None:
            facts["broker"] = self._broker.is_alive
        if self._scorers:
            lives = {name: _life(each.healthy) for name, each in self._scorers.items()}
            facts["scorers"] = _named(lives)
        if self._passes:
            facts["replicas"] = _named({name: _told(each) for name, each in self._passes.items()})
        return facts

    @property
    def is_healthy(self) -> bool:
        """Whether the broker lives and, where there are teachers of its own, one of them is able.

        The others' students come and go meanwhile; each has a health of its own.
        """
        able = self.able().values()
        lines = self._broker is None or self._broker.is_alive
        return lines and (any(able) or not able)

    def able(self) -> dict[str, bool]:
        """Return whether each of its own teachers takes requests.

        Its thread lives and, where it runs in replicas, so does theirs, and one is ready.
        """
        able = {name: scorer.healthy for name, scorer in self._scorers.items()}
        for name, passes in self._passes.items():
            ready = any(each.state == "ready" for each in passes.replicas())
            able[name] = able[name] and passes.is_alive and ready
        return able


def _told(passes: PassEngine) -> str:
    """Return what there is of a teacher's replicas, and why there are not more."""
    states = [each.state for each in passes.replicas()]
    why = "" if passes.refusal is None else f" ({passes.refusal.message})"
    return f"{_life(passes.is_alive)}, {states.count('ready')} of {len(states)} ready{why}"


def _life(lives: bool) -> str:
    return "alive" if lives else "gone"


def _named(said: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in said.items())
