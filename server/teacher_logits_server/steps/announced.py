"""Announced steps: what sessions were told of steps that are not all sealed yet.

Pure. What is announced is no lease: it holds no room and keeps no step, and whoever it was told
to reads nothing before every awaited slot says so. Once the step is complete its
session is granted it under the lease ids that were told; until then it can be taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits.keys import PayloadKey
    from teacher_logits.terms import StepGrant


class Announced:
    """The announcements of all sessions."""

    def __init__(self) -> None:
        self._told: dict[str, dict[int, StepGrant]] = {}

    def __bool__(self) -> bool:
        return bool(self._told)

    def add(self, session_id: str, terms: StepGrant) -> None:
        """Note that a session is told of a step."""
        self._told.setdefault(session_id, {})[terms.step] = terms

    def sessions(self) -> list[str]:
        """Return the sessions that were told of some step."""
        return list(self._told)

    def steps_of(self, session_id: str) -> frozenset[int]:
        """Return the steps that a session was told of."""
        return frozenset(self._told.get(session_id, ()))

    def has(self, session_id: str, step: int) -> bool:
        """Say whether a session was told of a step."""
        return step in self._told.get(session_id, ())

    def step_of(self, session_id: str, lease_id: str) -> int | None:
        """Return the step for which a session was told of a lease."""
        for step, terms in self._told.get(session_id, {}).items():
            if any(lease.lease_id == lease_id for lease in terms.leases):
                return step
        return None

    def lease_id(self, session_id: str, key: PayloadKey | None) -> str | None:
        """Return the id under which a session is to be leased a shard of a step, if it was told.

        The same rows may have been sealed anew since, where the first writer is gone.
        """
        told = self._told.get(session_id)
        if told is None or key is None or key.step not in told:
            return None
        for lease in told[key.step].leases:
            if lease.payload.key == key:
                return lease.lease_id
        return None

    def leases_of(self, session_id: str) -> list[str]:
        """Return the ids of all leases that a session was told of."""
        told = self._told.get(session_id, {}).values()
        return [lease.lease_id for terms in told for lease in terms.leases]

    def end(self, session_id: str, step: int) -> None:
        """Forget what a session was told of a step."""
        told = self._told.get(session_id, {})
        told.pop(step, None)
        if not told:
            self._told.pop(session_id, None)

    def forget(self, session_id: str) -> None:
        """Forget all that a session was told."""
        self._told.pop(session_id, None)
