"""Grants: which leases a student's session has for one step, and whether it has read them.

Pure. A step is consumed when every lease of a grant was returned by its reader; leases that
ended with their session, were given up or were taken away do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits.terms import StepGrant
    from teacher_logits_server.steps.parts import Seat


@dataclass(kw_only=True)
class Grant:
    """One grant of a step. Only the table changes it.

    ``request_id`` is empty where it went out as mail.
    """

    session_id: str
    request_id: str
    seat: Seat | None
    terms: StepGrant
    open_leases: set[str]
    is_spoiled: bool = False

    @property
    def step(self) -> int:
        """The step."""
        return self.terms.step


class Grants:
    """The grants of which a lease is out."""

    def __init__(self) -> None:
        self._by_lease: dict[str, Grant] = {}
        self._by_request: dict[tuple[str, str], Grant] = {}
        self._out: dict[tuple[str, int], int] = {}

    def add(self, grant: Grant) -> None:
        """Take a grant in; one without leases has nothing that could come back."""
        if not grant.open_leases:
            return
        for lease_id in grant.open_leases:
            self._by_lease[lease_id] = grant
        if grant.request_id:
            self._by_request[grant.session_id, grant.request_id] = grant
        key = (grant.session_id, grant.step)
        self._out[key] = self._out.get(key, 0) + 1

    def of_request(self, session_id: str, request_id: str) -> Grant | None:
        """Return what a request was granted, while a lease of it is out."""
        return self._by_request.get((session_id, request_id))

    def is_out(self, session_id: str, step: int) -> bool:
        """Say whether a session has a lease of a step."""
        return (session_id, step) in self._out

    def steps_of(self, session_id: str) -> frozenset[int]:
        """Return the steps of which a session has a lease."""
        return frozenset(step for reader, step in self._out if reader == session_id)

    def end(self, lease_id: str, *, returned: bool) -> Grant | None:
        """Note the end of a lease; return its grant where it was the last and all were read."""
        grant = self._by_lease.pop(lease_id, None)
        if grant is None:
            return None
        grant.open_leases.discard(lease_id)
        grant.is_spoiled = grant.is_spoiled or not returned
        if grant.open_leases:
            return None
        key = (grant.session_id, grant.step)
        self._out[key] -= 1
        if not self._out[key]:
            del self._out[key]
        self._by_request.pop((grant.session_id, grant.request_id), None)
        return None if grant.is_spoiled else grant
