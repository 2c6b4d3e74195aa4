"""Everything that can go wrong, as one tree.

    TeacherLogitsError                     reason, facts (every number of the message), retry_after
    ├─ ContractViolation                   the caller must change something; never retried
    │  ├─ SessionRefusedError              every broken rule of a handshake
    │  ├─ GridMismatchError, NotNodeLocalError   the same rules, called as functions
    │  ├─ RequestInvalidError, PayloadInvalidError   what cannot be read; shape, type, rows, NaN
    │  ├─ AlignmentError                   digest, probe or lookup disagrees: row, position, offset
    │  ├─ UnknownTeacherError, NoCommonTransportError   with those there are; with every refusal
    │  ├─ ConfigError, ForkedClientError   a setting and its flag; a client in a forked child
    │  ├─ PayloadConflictError             same key, other bytes; rows that overlap
    │  └─ NotAllowedError, its UnknownCallerError   not this caller's; no token that is known
    ├─ StaleReference                      it was right once; start again one level up
    │  ├─ EpochChangedError, SessionExpiredError, LeaseLostError, ReservationLapsedError
    │  └─ StalePayloadError                bytes were overwritten under a reader: discard the step
    ├─ NotAvailable                        waiting or room may help
    │  ├─ PayloadRetiredError, its ProducerLostError   no new leases; its writer died
    │  ├─ DeadlinePassedError, PoolFullError   what was waited for; need, free, quarantined
    │  ├─ LimitReachedError                which limit, its number, the flag that raises it
    │  ├─ HostCopyNeededError              a reader cannot open the device memory that it lies in
    │  ├─ DrainingError, ServerUnreachableError   no new work; nobody answers at the address
    │  └─ EngineError                      the teacher failed on these rows
    └─ TransportFailure                    the bytes did not come this way; fallback decides
       ├─ SlabOpenError, StreamBrokenError   a slab cannot be mapped; a stream ended early
       └─ ObjectLostError, ChecksumError   an object store lost it; bytes changed on the way

The four branches are the four things a caller does: fix the call, start again one
level up, wait, try another way. How each travels over gRPC stands in ``wire_errors``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

Fact = int | float | str
"""A number or a name of a message. Facts travel beside the message, so that no caller parses it."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken rule: its stable name, a sentence with the way out, and the numbers in it."""

    rule: str
    message: str
    facts: Mapping[str, Fact] = field(default_factory=dict)


class TeacherLogitsError(Exception):
    """Base of every error this project raises on purpose.

    ``reason`` is the error's stable name (UPPER_SNAKE_CASE, the same on the wire),
    ``facts`` every number and name that the message mentions, and ``retry_after`` how
    long to wait before another try, where the raiser knows.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        facts: Mapping[str, Fact] | None = None,
        retry_after: timedelta | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.facts: dict[str, Fact] = dict(facts or {})
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders (Ray, multiprocessing): keep every attribute.
        return (type(self).__new__, (type(self), self.message), self.__dict__)


class ContractViolation(TeacherLogitsError):
    """The caller must change something. Never retried."""

    reason = "CONTRACT_VIOLATION"


class StaleReference(TeacherLogitsError):
    """What the caller names was right once. Start again one level up."""

    reason = "STALE_REFERENCE"


class NotAvailable(TeacherLogitsError):
    """Not now. Waiting or room may help."""

    reason = "NOT_AVAILABLE"


class TransportFailure(TeacherLogitsError):
    """The bytes did not come this way. The client's fallback decides what is tried next."""

    reason = "TRANSPORT_FAILURE"


class _RuleError(ContractViolation):
    """A refusal that names every broken rule, in the order in which the rules are checked."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        if not violations:
            raise ValueError("a refusal needs at least one violation")
        facts: dict[str, Fact] = {}
        for violation in violations:  # where two rules name a number, the first wins
            facts = {**facts, **violation.facts, **facts}
        super().__init__("; ".join(f"{v.rule}: {v.message}" for v in violations), facts=facts)
        self.violations: tuple[Violation, ...] = tuple(violations)


class SessionRefusedError(_RuleError):
    """A handshake broke rules; ``violations`` has every one, in the order they are checked."""

    reason = "SESSION_REFUSED"


class GridMismatchError(_RuleError, AssertionError):
    """Two batch grids do not fit; an ``AssertionError`` too, as NeMo RL's callers expect."""

    reason = "GRID_MISMATCH"


class NotNodeLocalError(_RuleError, AssertionError):
    """Two model grids may cross nodes; an ``AssertionError`` too, as NeMo RL's callers expect."""

    reason = "NOT_NODE_LOCAL"


class RequestInvalidError(ContractViolation):
    """A call that cannot be read, lacks a deadline, or names things that make no sense together."""

    reason = "REQUEST_INVALID"


class PayloadInvalidError(ContractViolation):
    """A payload or a request for one has the wrong shape, type, k, rows, ids, or a NaN."""

    reason = "PAYLOAD_INVALID"


class AlignmentError(ContractViolation):
    """Teacher and student speak of differing tokens; the message says where and how far off."""

    reason = "ALIGNMENT"


class UnknownTeacherError(ContractViolation):
    """No such teacher here; ``facts`` names those there are."""

    reason = "UNKNOWN_TEACHER"


class ConfigError(ContractViolation):
    """A setting makes no sense; the message names the flag to change."""

    reason = "CONFIG"


class ForkedClientError(ContractViolation):
    """A client, session or lease was used in a forked child of the process that made it."""

    reason = "FORKED_CLIENT"


class NoCommonTransportError(ContractViolation):
    """No wanted transport can be had; ``facts`` holds every refusal."""

    reason = "NO_COMMON_TRANSPORT"


class PayloadConflictError(ContractViolation):
    """The key holds other bytes already, or rows overlap."""

    reason = "PAYLOAD_CONFLICT"


class NotAllowedError(ContractViolation):
    """This caller may not do this."""

    reason = "NOT_ALLOWED"


class UnknownCallerError(NotAllowedError):
    """The server asks for a token, and none was shown, or none that it knows."""

    reason = "UNKNOWN_CALLER"


class EpochChangedError(StaleReference):
    """The server was restarted: everything of the older epoch is gone. Open a new session."""

    reason = "EPOCH_CHANGED"


class SessionExpiredError(StaleReference):
    """The session has ended and is never revived. Open a new one."""

    reason = "SESSION_EXPIRED"


class LeaseLostError(StaleReference):
    """The lease has ended. Acquire the payload again."""

    reason = "LEASE_LOST"


class ReservationLapsedError(StaleReference):
    """The right to write has ended. Reserve again."""

    reason = "RESERVATION_LAPSED"


class StalePayloadError(StaleReference):
    """The room was reused under a reader. Discard everything computed from it."""

    reason = "STALE_PAYLOAD"


class PayloadRetiredError(NotAvailable):
    """The payload gives no new leases."""

    reason = "PAYLOAD_RETIRED"


class ProducerLostError(PayloadRetiredError):
    """The process that wrote the payload died before it was leased."""

    reason = "PRODUCER_LOST"


class DeadlinePassedError(NotAvailable):
    """The deadline passed; the message says what was waited for, and how long."""

    reason = "DEADLINE_PASSED"


class PoolFullError(NotAvailable):
    """The byte budget is spent; ``facts`` has the numbers."""

    reason = "POOL_FULL"


class LimitReachedError(NotAvailable):
    """As many are there as may be; ``facts`` has ``limit_name``, ``count``, ``limit``, ``flag``."""

    reason = "LIMIT_REACHED"


class HostCopyNeededError(NotAvailable):
    """What lies in device memory alone has to be copied to the host first, for some reader."""

    reason = "HOST_COPY_NEEDED"


class DrainingError(NotAvailable):
    """The server is shutting down and takes no new work."""

    reason = "DRAINING"


class ServerUnreachableError(NotAvailable):
    """Nobody answers at the address."""

    reason = "SERVER_UNREACHABLE"


class EngineError(NotAvailable):
    """The teacher failed on these rows. Its own words stay in the server's log."""

    reason = "ENGINE"


class SlabOpenError(TransportFailure):
    """A slab could not be opened or mapped."""

    reason = "SLAB_OPEN"


class StreamBrokenError(TransportFailure):
    """A stream ended before its last byte."""

    reason = "STREAM_BROKEN"


class ObjectLostError(TransportFailure):
    """An object store no longer has the object."""

    reason = "OBJECT_LOST"


class ChecksumError(TransportFailure):
    """Bytes changed on the way."""

    reason = "CHECKSUM"
