"""Proofs: what a session has shown of the memory that it shares, and what that is worth.

Pure. A proof is a MAC over a challenge that only a process which shares the memory could
have read: the page that the broker passed over the session's line, or the secret of a
server in the client's own process. Reader and writer that have both proven themselves to the
broker share memory with one another too. Device memory is proven writer by writer, by what lies
in the memory of each (``device_offers``); its host half comes over the broker line, so that it
takes that proof too. What the client says it could not do only explains a refusal; it proves and
disproves nothing, but that it does not want a writer's device memory any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from teacher_logits.transport import Refusal, RefusalReason, Transport, proof_holds
from teacher_logits_server.settlement.device_offers import both_sides

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from teacher_logits.profiles import NodeHints
    from teacher_logits_server.settlement.device_offers import DeviceOffer

_MAX_MESSAGE_CHARS = 300
_MAX_DEVICE_CHARS = 600
"""Of device memory: sentences that name the devices of both sides."""


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
class Proof:
    """What a session has proven, and why not the rest.

    ``devices`` are the writers whose device memory it has read, and ``device_reasons`` say why it
    has not read that of others, by writer; what is there for an empty one counts for all.
    """

    proven: frozenset[Transport] = frozenset()
    reasons: Mapping[Transport, Refusal] = field(default_factory=dict)
    devices: frozenset[str] = frozenset()
    device_reasons: Mapping[str, Refusal] = field(default_factory=dict)

    def of_writer(self, writer_id: str) -> Proof:
        """Return what it is worth for one writer: its device memory is a transport of its own."""
        device = self._device_refusal(writer_id)
        if device is None and writer_id in self.devices:
            return replace(self, proven=self.proven | {Transport.CUDA_IPC})
        reasons = self.reasons if device is None else {**self.reasons, Transport.CUDA_IPC: device}
        return replace(self, reasons=reasons)

    def may_try(self, writer_id: str) -> bool:
        """Say whether a writer's device memory was not tried yet, and would be of use."""
        tried = {*self.devices, *self.device_reasons}
        return Transport.SHARED_MEMORY in self.proven and not tried & {writer_id, ""}

    def _device_refusal(self, writer_id: str) -> Refusal | None:
        """Return why a writer's device memory is not proven; None where it is, or was not tried."""
        if writer_id not in self.devices:
            found = self.device_reasons.get(writer_id)
            return found or self.device_reasons.get("")
        if Transport.SHARED_MEMORY in self.proven:
            return None
        line = self.reasons.get(Transport.SHARED_MEMORY)
        why = "that it shares memory was not proven" if line is None else line.message
        return Refusal(
            transport=Transport.CUDA_IPC,
            reason=RefusalReason.PROOF_MISSING if line is None else line.reason,
            message=f"the host half of device memory comes over the broker line, and {why}",
        )

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
        failures: why a transport could not be proven, those that count most first. Those of
            device memory are ``judge_devices``'s.
    """
    reasons: dict[Transport, Refusal] = {
        refusal.transport: _cut(refusal)
        for refusal in reversed(failures)
        if refusal.transport is not Transport.CUDA_IPC
    }
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


def judge_devices(
    proof: Proof,
    *,
    nonce: bytes,
    reader: NodeHints,
    offers: Mapping[str, DeviceOffer],
    proofs: Mapping[str, bytes],
    failures: Iterable[Refusal],
) -> Proof:
    """Return a proof with what a client has shown of device memory, or could not.

    Args:
        reader: what its client says of where it lives, for messages.
        offers: what writers offer now, by writer; a proof of another's is worth nothing.
        proofs: what the client sent, by writer.
        failures: why it could not open a writer's memory. They take back what it has shown before.
    """
    devices, reasons = set(proof.devices), dict(proof.device_reasons)
    for refusal in failures:
        if refusal.transport is Transport.CUDA_IPC:
            reasons[refusal.writer_id] = _cut(refusal)
            devices -= {refusal.writer_id} if refusal.writer_id else set(devices)
    for writer_id, mac in proofs.items():
        offer = offers.get(writer_id)
        if offer is None:
            continue
        if proof_holds(mac, offer.challenge, nonce=nonce, transport=Transport.CUDA_IPC):
            devices.add(writer_id)
            reasons.pop(writer_id, None)
            continue
        devices.discard(writer_id)
        reasons[writer_id] = Refusal(
            transport=Transport.CUDA_IPC,
            reason=RefusalReason.DATA_DIFFERS,
            message="what the client read on the writer's device is not what was written there: "
            + both_sides(offer.probe, reader),
            writer_id=writer_id,
        )
    return replace(proof, devices=frozenset(devices), device_reasons=reasons)


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


def _cut(refusal: Refusal) -> Refusal:
    """Bound a sentence that a client wrote: it is kept as long as the session lives."""
    is_device = refusal.transport is Transport.CUDA_IPC
    return Refusal(
        transport=refusal.transport,
        reason=refusal.reason,
        message=refusal.message[: _MAX_DEVICE_CHARS if is_device else _MAX_MESSAGE_CHARS],
        writer_id=refusal.writer_id,
    )
