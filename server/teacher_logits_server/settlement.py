"""Settlement: from what was proven of shared memory to the transport of each writer's payloads.

Pure. A proof is a MAC over a challenge that only a process which shares the memory could
have read: the page that the broker passed over the session's line, or the secret of a
server in the client's own process. Reader and writer that have both proven themselves to the
broker share memory with one another too. What the client says it could not do only explains
a refusal; it proves and disproves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import NoCommonTransportError, SessionRefusedError, Violation
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import (
    Locality,
    Refusal,
    RefusalReason,
    Settlement,
    Transport,
    proof_holds,
    settle,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from teacher_logits.errors import Fact

_MAX_MESSAGE_CHARS = 300

_OF_PUBLISHERS = frozenset({Transport.SHARED_MEMORY, Transport.STREAM})
"""How the payloads in a publisher's own slabs can be read; ``local`` is of the server's own."""


class Page(Protocol):
    """What a local session's reader sees of its leases; see ``session_page``."""

    def revoke(self, lease_id: str) -> None:
        """Tell the reader that a lease was taken back: one store into mapped memory."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A session's broker line: who is at its other end, and what it was given to read.

    ``started`` is when the process began, in ticks of its kernel, so that no other is taken for
    it; 0 where that is not known.
    """

    pid: int
    challenge: bytes
    started: int = 0
    page: Page | None = None


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Which transports a session wants, most wanted first, and whether it insists."""

    transports: tuple[Transport, ...]
    locality: Locality


OF_A_PUBLISHER = Wishes(
    transports=(Transport.SHARED_MEMORY, Transport.STREAM), locality=Locality.PREFER
)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a session has proven, and why not the rest."""

    proven: frozenset[Transport] = frozenset()
    reasons: Mapping[Transport, Refusal] = field(default_factory=dict)

    def without_line(self) -> Proof:
        """Return what is left of it once the session's line has ended."""
        lost = line_lost()
        return replace(
            self,
            proven=self.proven - {lost.transport},
            reasons={**self.reasons, lost.transport: lost},
        )


NOTHING_PROVEN = Proof()


def judge(
    *,
    nonce: bytes,
    challenges: Mapping[Transport, bytes],
    proofs: Mapping[Transport, bytes],
    failures: Sequence[Refusal],
) -> Proof:
    """Return what a client's proofs are worth.

    Args:
        nonce: the session's, under which proofs are made.
        challenges: what the client had to read, by transport; one that is not here could
            not be read by this client.
        proofs: what the client sent.
        failures: why a transport could not be proven, those that count most first.
    """
    reasons = {refusal.transport: _cut(refusal) for refusal in reversed(failures)}
    proven = set()
    for transport, challenge in challenges.items():
        mac = proofs.get(transport)
        if mac is None:
            continue
        if proof_holds(mac, challenge, nonce=nonce, transport=transport):
            proven.add(transport)
        else:
            reasons[transport] = Refusal(
                transport=transport,
                reason=RefusalReason.PROOF_WRONG,
                message="the client's proof does not match what the server wrote",
            )
    if Transport.LOCAL not in proofs:
        reasons.setdefault(Transport.LOCAL, _OTHER_PROCESS)
    return Proof(proven=frozenset(proven), reasons=reasons)


def settle_writer(
    wishes: Wishes, proof: Proof, *, writer_id: str, offered: frozenset[Transport]
) -> Settlement:
    """Return the transport that a writer's payloads come over.

    Args:
        writer_id: the server itself, or a publisher that has proven to share its memory.
        offered: transports that this server has at all.

    Raises:
        SessionRefusedError: the session insists on locality and it was not proven; the rule
            is ``not_proven_local``.
        NoCommonTransportError: nothing that it wants is left.
    """
    if writer_id != SERVER_WRITER:
        offered &= _OF_PUBLISHERS
    settlement = settle(
        writer_id=writer_id,
        wanted=wishes.transports,
        offered=offered,
        proven=proof.proven,
        failures=proof.reasons,
    )
    return _insist(settlement, wishes, offered)


def line_lost() -> Refusal:
    """Return the refusal of a session whose line ended before it proved anything."""
    return Refusal(
        transport=Transport.SHARED_MEMORY,
        reason=RefusalReason.PROOF_MISSING,
        message="the broker line ended before the client proved what it read over it",
    )


_OTHER_PROCESS = Refusal(
    transport=Transport.LOCAL,
    reason=RefusalReason.OTHER_PROCESS,
    message="the client does not run in the server's own process",
)


def _insist(settlement: Settlement, wishes: Wishes, offered: frozenset[Transport]) -> Settlement:
    """Return the settlement, or refuse one that the session said it cannot live with."""
    transport, locality = settlement.transport, wishes.locality
    refusals = {refusal.transport.value: refusal for refusal in settlement.refusals}
    facts: dict[str, Fact] = {name: r.reason.value for name, r in refusals.items()}
    why = "; ".join(f"{name} {r.reason.value}: {r.message}" for name, r in refusals.items())
    if not wishes.transports:
        why = "its list of transports is empty"
    why = why or "the student wants no transport that needs proof"
    if settlement.writer_id != SERVER_WRITER:
        facts["writer_id"] = settlement.writer_id
    if locality is not Locality.PREFER and (transport is None or not transport.is_local):
        message = (
            f"locality is {locality.value!r}, and reader and writer are not proven to share "
            f"memory ({why}); `teacher-logits doctor` says what stands in the way, and locality "
            "'prefer' would stream"
        )
        violation = Violation(rule="not_proven_local", message=message, facts=facts)
        raise SessionRefusedError([violation])
    if transport is None:
        raise NoCommonTransportError(
            f"none of the transports that the student wants can be had ({why}); "
            f"{_way_out(wishes, offered)}",
            facts=facts,
        )
    return settlement


def _way_out(wishes: Wishes, offered: frozenset[Transport]) -> str:
    """Name what is on offer, works from another process, and was not tried."""
    untried = [
        transport.value
        for transport in (Transport.SHARED_MEMORY, Transport.STREAM)
        if transport in offered and transport not in wishes.transports
    ]
    if untried:
        return f"allow {' or '.join(map(repr, untried))}"
    return "nothing else is on offer: have 'stream' added to the server's --transports"


def _cut(refusal: Refusal) -> Refusal:
    """Bound a sentence that a client wrote: it is kept as long as the session lives."""
    return Refusal(
        transport=refusal.transport,
        reason=refusal.reason,
        message=refusal.message[:_MAX_MESSAGE_CHARS],
    )
