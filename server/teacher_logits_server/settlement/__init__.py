"""Settlement: from what was proven of shared memory to the transport of each writer's payloads.

Pure. The first transport that a session wants, its writer offers and a proof admits (``proofs``)
is the one; a session that insists on locality is refused where that comes to none.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from teacher_logits.errors import NoCommonTransportError, SessionRefusedError, Violation
from teacher_logits.profiles import NodeHints
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import (
    Locality,
    Refusal,
    RefusalReason,
    Settlement,
    Transport,
    settle,
)
from teacher_logits_server.settlement.device_offers import both_sides, side_facts

if TYPE_CHECKING:
    from teacher_logits.errors import Fact
    from teacher_logits_server.settlement.device_offers import DeviceOffer
    from teacher_logits_server.settlement.proofs import Proof

_OF_PUBLISHERS = frozenset(
    {Transport.CUDA_IPC, Transport.SHARED_MEMORY, Transport.RAY_OBJECT, Transport.STREAM}
)
"""How the payloads in a publisher's own slabs can be read; ``local`` is of the server's own."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Which transports a session wants, most wanted first, and whether it insists.

    ``hints`` are what its client says of where it lives, for messages.
    """

    transports: tuple[Transport, ...]
    locality: Locality
    hints: NodeHints = field(default_factory=NodeHints)


OF_A_PUBLISHER = Wishes(
    transports=(Transport.SHARED_MEMORY, Transport.STREAM), locality=Locality.PREFER
)


def settle_writer(
    wishes: Wishes,
    proof: Proof,
    *,
    writer_id: str,
    offered: frozenset[Transport],
    device: DeviceOffer | None = None,
) -> Settlement:
    """Return the transport that a writer's payloads come over.

    Args:
        writer_id: the server itself, or a publisher that has proven to share its memory.
        offered: transports that this server has at all.
        device: what the writer offers to be opened of its device memory, if it has some.

    Raises:
        SessionRefusedError: the session insists on locality and it was not proven; the rule
            is ``not_proven_local``.
        NoCommonTransportError: nothing that it wants is left.
    """
    if writer_id != SERVER_WRITER:
        offered &= _OF_PUBLISHERS
    if device is None or Transport.CUDA_IPC not in offered:
        device, offered = None, offered - {Transport.CUDA_IPC}
    proof = proof.of_writer(writer_id)
    is_untried = Transport.CUDA_IPC not in {*proof.proven, *proof.reasons}
    if device is not None and is_untried:
        proof = replace(
            proof, reasons={**proof.reasons, Transport.CUDA_IPC: _untried(device, wishes)}
        )
    settlement = settle(
        writer_id=writer_id,
        wanted=wishes.transports,
        offered=offered,
        proven=proof.proven,
        failures=proof.reasons,
    )
    settlement = _insist(settlement, wishes, offered, device)
    is_refused = any(each.transport is Transport.CUDA_IPC for each in settlement.refusals)
    can_try = is_untried and is_refused and Transport.SHARED_MEMORY in proof.proven
    if device is None or not can_try:
        return settlement
    return replace(settlement, probe=device.probe)


def _untried(device: DeviceOffer, wishes: Wishes) -> Refusal:
    return Refusal(
        transport=Transport.CUDA_IPC,
        reason=RefusalReason.PROOF_MISSING,
        message="no proof came that the client can open the writer's device memory: "
        + both_sides(device.probe, wishes.hints),
        writer_id=device.probe.writer_id,
    )


def _insist(
    settlement: Settlement,
    wishes: Wishes,
    offered: frozenset[Transport],
    device: DeviceOffer | None,
) -> Settlement:
    """Return the settlement, or refuse one that the session said it cannot live with."""
    transport, locality = settlement.transport, wishes.locality
    refusals = {refusal.transport.value: refusal for refusal in settlement.refusals}
    facts: dict[str, Fact] = {name: r.reason.value for name, r in refusals.items()}
    why = "; ".join(f"{name} {r.reason.value}: {r.message}" for name, r in refusals.items())
    if not wishes.transports:
        why = "its list of transports is empty"
    why = why or "the student wants no transport that shares memory"
    if settlement.writer_id != SERVER_WRITER:
        facts["writer_id"] = settlement.writer_id
    if device is not None and Transport.CUDA_IPC.value in refusals:
        facts |= side_facts(device.probe, wishes.hints)
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
