"""Settlement: from what was proven of shared memory to the one transport of a session.

Pure. A proof is a MAC over a challenge that only a process which shares the memory could
have read: the page that the broker passed over the session's line, or the secret of a
server in the client's own process. What the client says it could not do only explains a
refusal; it proves and disproves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from teacher_logits.profiles import StudentProfile

_MAX_MESSAGE_CHARS = 300


def settle_transport(
    student: StudentProfile,
    *,
    offered: frozenset[Transport],
    nonce: bytes,
    challenges: Mapping[Transport, bytes],
    proofs: Mapping[Transport, bytes],
    failures: Sequence[Refusal],
) -> Settlement:
    """Return the transport that the server's own payloads come over.

    Args:
        student: its wishes, in order, and how much it insists on locality.
        offered: transports that this server has at all.
        nonce: the session's, under which proofs are made.
        challenges: what the client had to read, by transport; one that is not here could
            not be read by this client.
        proofs: what the client sent.
        failures: why a transport could not be proven, those that count most first.

    Raises:
        SessionRefusedError: the student insists on locality and it was not proven; the rule
            is ``not_proven_local``.
        NoCommonTransportError: nothing that the student wants is left.
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
    settlement = settle(
        writer_id=SERVER_WRITER,
        wanted=student.transports,
        offered=offered,
        proven=frozenset(proven),
        failures=reasons,
    )
    return _insist(settlement, student, offered)


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


def _insist(
    settlement: Settlement, student: StudentProfile, offered: frozenset[Transport]
) -> Settlement:
    """Return the settlement, or refuse one that the student said it cannot live with."""
    transport, locality = settlement.transport, student.locality
    refusals = {refusal.transport.value: refusal for refusal in settlement.refusals}
    facts: dict[str, Fact] = {name: r.reason.value for name, r in refusals.items()}
    why = "; ".join(f"{name} {r.reason.value}: {r.message}" for name, r in refusals.items())
    if not student.transports:
        why = "its list of transports is empty"
    why = why or "the student wants no transport that needs proof"
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
            f"{_way_out(student, offered)}",
            facts=facts,
        )
    return settlement


def _way_out(student: StudentProfile, offered: frozenset[Transport]) -> str:
    """Name what is on offer, works from another process, and was not tried."""
    untried = [
        transport.value
        for transport in (Transport.SHARED_MEMORY, Transport.STREAM)
        if transport in offered and transport not in student.transports
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
