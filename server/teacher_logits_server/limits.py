"""What the tables need of a server's settings, and the caps that come of it.

``config.ServerConfig`` has all of the settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from teacher_logits_server.caps import Cap

if TYPE_CHECKING:
    from datetime import timedelta


class RequestLimits(Protocol):
    """What every part that reads scoring requests needs of a server's settings."""

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one scoring request, prefixes included."""


class Limits(RequestLimits, Protocol):
    """Spans, counts and sizes that the ledger obeys."""

    @property
    def session_ttl(self) -> timedelta:
        """How long a remote session lives without a sign of life."""

    @property
    def renew_interval(self) -> timedelta:
        """How often clients are told to give one."""

    @property
    def opening_ttl(self) -> timedelta:
        """How long a session may stay unsettled."""

    @property
    def default_wait(self) -> timedelta:
        """How long a call may wait in the server."""

    @property
    def max_sessions(self) -> int:
        """Most sessions of students at a time."""

    @property
    def max_student_sessions(self) -> int:
        """Most of them that one student may have."""

    @property
    def max_publishers(self) -> int:
        """Most sessions of publishers at a time."""

    @property
    def max_session_leases(self) -> int:
        """Most leases of one session."""

    @property
    def max_session_share(self) -> float:
        """Share of a pool that what is scored for one session may take."""

    @property
    def max_reservations(self) -> int:
        """Most payloads that one publisher has reserved and not sealed."""

    @property
    def max_steps(self) -> int:
        """Most steps of a published teacher that are not retired."""

    @property
    def max_slabs(self) -> int:
        """Most slabs of one publisher's own."""

    @property
    def pool_size_bytes(self) -> int:
        """Byte budget of all slabs together."""

    @property
    def slab_size_bytes(self) -> int:
        """Usual size of a slab."""

    @property
    def max_quarantine(self) -> float:
        """Share of the budget in quarantine above which new payloads are refused."""

    @property
    def keep_deserted(self) -> timedelta:
        """How long steps are kept of a teacher that all its publishers and readers have left."""

    @property
    def keep_steps(self) -> int:
        """Most steps kept of a published teacher; 0 for all that are not consumed."""


class ScorerLimits(RequestLimits, Protocol):
    """What the scorer needs of a server's settings; ``config.ServerConfig`` has it."""

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one pass, padding included."""

    @property
    def max_waiting_requests(self) -> int:
        """Most requests that wait."""

    @property
    def max_session_requests(self) -> int:
        """Most requests of one session that wait or run."""


class CallLimits(RequestLimits, Protocol):
    """What the rim needs of a server's settings."""

    @property
    def max_calls(self) -> int:
        """Most calls under way, but for those that watch the server's health."""

    @property
    def max_watchers(self) -> int:
        """Most of those."""

    @property
    def max_waiting_calls(self) -> int:
        """Most calls that wait for one thing."""

    @property
    def max_session_calls(self) -> int:
        """Most of them of one session."""


@dataclass(frozen=True, kw_only=True)
class LedgerCaps:
    """How many leases a session may have, and how much a publisher may have ahead of its readers.

    ``slabs`` are of one publisher, ``steps`` of one teacher, whoever of its publishers began them.
    """

    session_leases: Cap
    reservations: Cap
    steps: Cap
    slabs: Cap


def ledger_caps(limits: Limits) -> LedgerCaps:
    """Return the caps that the ledger keeps."""
    return LedgerCaps(
        session_leases=Cap(
            name="session_leases",
            most=limits.max_session_leases,
            flag="--max-session-leases",
            what="leases of this session",
            way_out="return some",
        ),
        reservations=Cap(
            name="reservations",
            most=limits.max_reservations,
            flag="--max-reservations",
            what="payloads that this publisher has reserved and not sealed",
            way_out="seal or abandon some",
        ),
        steps=Cap(
            name="steps",
            most=limits.max_steps,
            flag="--max-steps",
            what="steps of the teacher that are not retired",
            way_out="wait until students have read some",
        ),
        slabs=Cap(
            name="slabs",
            most=limits.max_slabs,
            flag="--max-slabs",
            what="slabs of this publisher's here",
            way_out="make them fewer and larger",
        ),
    )
