"""Transports, proof, and which of them a session settles on.

Being on the same node is proven, not believed. ``settle`` is the one place where a
transport is chosen: the first in the student's order that the writer offers and that
proof admits. Everything else it wanted comes back as a refusal with its reason.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from teacher_logits.device_memory import DeviceProbe


class Transport(enum.Enum):
    """A way to move a payload from its writer to a reader."""

    LOCAL = "local"
    CUDA_IPC = "cuda_ipc"
    SHARED_MEMORY = "shared_memory"
    RAY_OBJECT = "ray_object"
    STREAM = "stream"

    @property
    def is_local(self) -> bool:
        """Whether reader and writer share memory over it."""
        return self in _LOCAL

    @property
    def needs_proof(self) -> bool:
        """Whether its reader has to show that it is where the bytes are: everywhere but one."""
        return self is not Transport.STREAM


_LOCAL = frozenset({Transport.LOCAL, Transport.CUDA_IPC, Transport.SHARED_MEMORY})

PREFERENCE = (
    Transport.LOCAL,
    Transport.CUDA_IPC,
    Transport.SHARED_MEMORY,
    Transport.RAY_OBJECT,
    Transport.STREAM,
)


class Locality(enum.Enum):
    """How much a student insists on reading what lies in memory that it shares with its writer."""

    #: Proof decides, writer by writer: what is not shared is streamed.
    PREFER = "prefer"
    #: What is not proven to be shared refuses the session.
    REQUIRE = "require"
    #: The arithmetic rule of NeMo RL refuses first, before any proof; then as ``REQUIRE``.
    RULE = "rule"


class RefusalReason(enum.Enum):
    """Why a wanted transport is not on offer."""

    NOT_OFFERED = "NOT_OFFERED"
    BROKER_UNREACHABLE = "BROKER_UNREACHABLE"
    BROKER_REFUSED = "BROKER_REFUSED"
    PEER_UNPROVEN = "PEER_UNPROVEN"
    PROOF_MISSING = "PROOF_MISSING"
    PROOF_WRONG = "PROOF_WRONG"
    OTHER_PROCESS = "OTHER_PROCESS"
    SLAB_NOT_MAPPABLE = "SLAB_NOT_MAPPABLE"
    PLATFORM = "PLATFORM"
    # Of device memory. NO_DEVICE: no driver, or no device, in the reader.
    NO_DEVICE = "NO_DEVICE"
    # The reader does not see the writer's device.
    OTHER_DEVICE = "OTHER_DEVICE"
    NO_PEER_ACCESS = "NO_PEER_ACCESS"
    OTHER_PID_NAMESPACE = "OTHER_PID_NAMESPACE"
    MIG = "MIG"
    # The driver refused the trial open, or did not answer before its deadline.
    DRIVER_FAILED = "DRIVER_FAILED"
    DRIVER_SLOW = "DRIVER_SLOW"
    # It was opened, and something else was read there than the writer wrote.
    DATA_DIFFERS = "DATA_DIFFERS"
    # The writer lives in the reader's own process.
    OWN_HANDLE = "OWN_HANDLE"
    # Of a Ray cluster's object store. NO_RAY: the reader's process cannot import it.
    NO_RAY = "NO_RAY"
    # It is no worker and no driver of any cluster, or of one over Ray Client alone.
    NOT_IN_RAY = "NOT_IN_RAY"
    # It is of a cluster in which the server's holder is not.
    OTHER_CLUSTER = "OTHER_CLUSTER"
    # The holder was there and does not answer.
    HOLDER_GONE = "HOLDER_GONE"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One wanted transport that is not on offer, with its reason and a sentence.

    ``writer_id`` names the writer whose memory it is about; it is empty for all of them.
    """

    transport: Transport
    reason: RefusalReason
    message: str
    writer_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """The transport that one writer's payloads come over; none where nothing wanted is left.

    ``probe`` is device memory of a writer that came after the session's proofs: to prove it now
    would settle the writer on ``cuda_ipc``.
    """

    writer_id: str
    transport: Transport | None
    refusals: tuple[Refusal, ...] = field(default=())
    probe: DeviceProbe | None = None


def settle(
    *,
    writer_id: str,
    wanted: Sequence[Transport],
    offered: frozenset[Transport],
    proven: frozenset[Transport],
    failures: Mapping[Transport, Refusal],
) -> Settlement:
    """Choose the first wanted transport that is offered and, where it needs proof, proven.

    ``failures`` is what either side found while it tried to prove a transport. Only what
    stands before the chosen transport in ``wanted`` is refused; what stands behind it was
    not needed.
    """
    refusals: list[Refusal] = []
    for transport in wanted:
        if transport in offered and (not transport.needs_proof or transport in proven):
            return Settlement(writer_id=writer_id, transport=transport, refusals=tuple(refusals))
        refusals.append(_refusal(transport, writer_id, offered, failures))
    return Settlement(writer_id=writer_id, transport=None, refusals=tuple(refusals))


def _refusal(
    transport: Transport,
    writer_id: str,
    offered: frozenset[Transport],
    failures: Mapping[Transport, Refusal],
) -> Refusal:
    if transport not in offered:
        names = ", ".join(t.value for t in PREFERENCE if t in offered) or "nothing"
        return Refusal(
            transport=transport,
            reason=RefusalReason.NOT_OFFERED,
            message=f"writer {writer_id!r} offers {names}",
        )
    return failures.get(transport) or Refusal(
        transport=transport,
        reason=RefusalReason.PROOF_MISSING,
        message=f"the client sent no proof that it shares memory with writer {writer_id!r}"
        if transport.is_local
        else "the client sent no proof that it is where the objects are",
    )


def proof_of(challenge: bytes, *, nonce: bytes, transport: Transport) -> bytes:
    """Return the MAC that proves a challenge was read: HMAC-SHA256 under the session's nonce."""
    return hmac.new(nonce, transport.value.encode() + b"\0" + challenge, hashlib.sha256).digest()


def proof_holds(mac: bytes, challenge: bytes, *, nonce: bytes, transport: Transport) -> bool:
    """Compare a MAC with the expected one in constant time."""
    return hmac.compare_digest(mac, proof_of(challenge, nonce=nonce, transport=transport))
