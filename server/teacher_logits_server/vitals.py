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

    def threads(self) -> dict[str, bool]:
        """Return which threads there are, and whether each lives."""
        threads = {f"scorer of {name}": each.healthy for name, each in self._scorers.items()}
        if self._broker is not None:
            threads["broker"] = self._broker.is_alive
        for name, passes in self._passes.items():
            threads[f"replicas of {name}"] = passes.is_alive
        return threads

    def replicas(self) -> tuple[ReplicaView, ...]:
        """Describe the replicas of the teachers that run in some."""
        return tuple(
            replace(each, teacher_id=teacher_id)
            for teacher_id, passes in self._passes.items()
            for each in passes.replicas()
        )

    def health(self) -> dict[str, str | bool]:
        """Return what the health is made of, for the log."""
        facts: dict[str, str | bool] = {**self.threads()}
        for name, passes in self._passes.items():
            states = [each.state for each in passes.replicas()]
            facts[f"ready of {name}"] = f"{states.count('ready')} of {len(states)} replicas"
            why = passes.refusal
            facts[f"reason of {name}"] = "" if why is None else why.message
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
