"""Refusals: every call and connection that was turned away, counted at one place a surface.

    rpc      ``interceptors.Guard``, around every gRPC call
    line     ``services.line.LineDesk``, around every packet
    broker   the broker, for connections that come to no line or are dropped from one
    tls      ``handshakes``, for connections over TCP that come to no call

Promises: one refusal is counted once; no label has anything of the caller's. Safe on any thread.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    ContractViolation,
    NotAvailable,
    StaleReference,
    TeacherLogitsError,
    TransportFailure,
    Violation,
)
from teacher_logits_server.metrics import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import CollectorRegistry

UNKNOWN_METHOD = "UNKNOWN_METHOD"
"""A gRPC call of something that this server does not have."""


class Surface(enum.Enum):
    """Where a caller was refused."""

    RPC = "rpc"
    LINE = "line"
    BROKER = "broker"
    TLS = "tls"


class TurnedAway(enum.Enum):
    """Why the broker takes no connection, or drops one."""

    TOO_MANY_LINES = "TOO_MANY_LINES"
    NO_DESCRIPTORS = "NO_DESCRIPTORS"
    PEER_UNKNOWN = "PEER_UNKNOWN"
    NO_HELLO = "NO_HELLO"
    #: Of one user; the oldest of those that said no hello makes way.
    TOO_MANY_STRANGERS = "TOO_MANY_STRANGERS"
    REPLIES_UNREAD = "REPLIES_UNREAD"


class BrokenHandshake(enum.Enum):
    """Why a connection with TLS did not come about."""

    NOT_TLS = "NOT_TLS"
    CLIENT_CERTIFICATE_MISSING = "CLIENT_CERTIFICATE_MISSING"
    CLIENT_CERTIFICATE_REFUSED = "CLIENT_CERTIFICATE_REFUSED"
    #: By the client, as a rule: it does not take the server's certificate.
    BROKEN_OFF = "BROKEN_OFF"


class Refusals:
    """Counts refusals; in a registry, if one is given."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._refusals = names.REFUSALS.counter(registry)
        self._errors = names.ERRORS.counter(registry)
        self._rules = names.BROKEN_RULES.counter(registry)

    def refused(self, surface: Surface, error: BaseException) -> None:
        """Count a call that ended in an error.

        What is not of the error tree is no refusal, but an ``internal`` error of the server's.
        """
        self._errors.labels(surface.value, class_of(error)).inc()
        if not isinstance(error, TeacherLogitsError):
            return
        self._refusals.labels(surface.value, error.reason).inc()
        violations: Sequence[Violation] = getattr(error, "violations", ())
        for violation in violations:
            self._rules.labels(violation.rule).inc()

    def unknown_method(self) -> None:
        """Count a gRPC call that there is no handler for."""
        self._refusals.labels(Surface.RPC.value, UNKNOWN_METHOD).inc()

    def turned_away(self, why: TurnedAway) -> None:
        """Count a connection of the broker's."""
        self._refusals.labels(Surface.BROKER.value, why.value).inc()

    def broken_handshake(self, why: BrokenHandshake) -> None:
        """Count a connection that TLS ended before it had begun."""
        self._refusals.labels(Surface.TLS.value, why.value).inc()


def class_of(error: BaseException) -> str:
    """Return the branch of the error tree, in words: the four things that a caller may do."""
    branches: dict[type[TeacherLogitsError], str] = {
        ContractViolation: "contract_violation",
        StaleReference: "stale_reference",
        NotAvailable: "not_available",
        TransportFailure: "transport_failure",
    }
    return next((name for kind, name in branches.items() if isinstance(error, kind)), "internal")
