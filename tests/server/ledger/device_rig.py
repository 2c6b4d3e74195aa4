"""A ledger whose publishers write to device memory, and students that can open it or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.server.ledger.registering import ALL, CHALLENGE, SLAB, House, Publisher, student, teacher

from teacher_logits.device_memory import DeviceMemoryPart, DeviceProbe, ExportedMemory
from teacher_logits.profiles import PROTOCOL_VERSION, NodeHints
from teacher_logits.transport import Refusal, RefusalReason, Transport, proof_of
from teacher_logits_server.settlement.device_offers import DeviceOffer

if TYPE_CHECKING:
    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.terms import SessionTerms
    from teacher_logits.transport import Settlement
    from teacher_logits_server.ledger import OpenedSession

UUID = "GPU-00000000-aaaa-4000-8000-000000000000"
WANTED = (Transport.CUDA_IPC, Transport.SHARED_MEMORY, Transport.STREAM)
SIGHTED = NodeHints(host_name="reader", device_uuids=(UUID,), namespaces={"pid": 4})


def memory(uuid: str = UUID, *, size_bytes: int = SLAB) -> ExportedMemory:
    return ExportedMemory(
        handle=bytes(64), device_uuid=uuid, base_offset_bytes=0, allocation_bytes=size_bytes
    )


def part(uuid: str = UUID, *, size_bytes: int = SLAB) -> DeviceMemoryPart:
    return DeviceMemoryPart(memory=memory(uuid, size_bytes=size_bytes), size_bytes=size_bytes)


def offer(shard: int = 0) -> DeviceOffer:
    probe = DeviceProbe(writer_id="", memory=memory(), pid_namespace=4, host="writer")
    return DeviceOffer(probe=probe, challenge=bytes([shard]) * 32)


def wishing(*, dp: int = 1, gbs: int = 12, rank: int = 0, **changes: object) -> StudentProfile:
    """A student that wants device memory first."""
    return student(dp=dp, gbs=gbs, rank=rank, **{"transports": WANTED, "hints": SIGHTED, **changes})


class DeviceHouse(House):
    """A ledger that offers ``cuda_ipc`` too."""

    def __init__(self, *, offered: frozenset[Transport] = ALL | {Transport.CUDA_IPC}) -> None:
        super().__init__(offered=offered)

    def publish_on_device(
        self, profile: TeacherProfile | None = None, *, local: bool = True
    ) -> Publisher:
        """Open a publisher with a probe, and bring a slab in device memory."""
        profile = profile or teacher(dp=1)
        opened = self.ledger.open_publisher(
            request_id=self.name(),
            protocol_version=PROTOCOL_VERSION,
            profile=profile,
            offer=offer(profile.data_parallel_rank),
        )
        session_id = self.prove(opened, local=local)
        (settlement,) = self.ledger.terms(session_id).settlements
        slab_id = f"slab-of-{self.name()}" if local else ""
        if local:
            self.ledger.add_foreign_slab(session_id, slab_id, SLAB, device=part())
        return Publisher(
            session_id=session_id, profile=profile, slab_id=slab_id, writer_id=settlement.writer_id
        )

    def prove_device(
        self,
        opened: OpenedSession,
        *,
        devices: bool = True,
        line: bool = True,
        why: RefusalReason | None = None,
    ) -> SessionTerms:
        """Settle a student that has read every probe, or has not; with a line, or without."""
        session_id, proofs = opened.terms.session_id, {}
        if line:
            self.ledger.check_hello(session_id, opened.nonce)
            self.ledger.line_opened(session_id, pid=7, challenge=CHALLENGE)
            transport = Transport.SHARED_MEMORY
            proofs[transport] = proof_of(CHALLENGE, nonce=opened.nonce, transport=transport)
        return self.ledger.prove_locality(
            session_id,
            proofs=proofs,
            failures=[] if why is None else [refusal(why)],
            device_proofs=self.macs(opened) if devices else {},
        )

    def macs(self, opened: OpenedSession, *probes: DeviceProbe) -> dict[str, bytes]:
        """What a student sends that has read its probes."""
        return {
            each.writer_id: proof_of(
                bytes([int(each.writer_id.split("-")[1])]) * 32,
                nonce=opened.nonce,
                transport=Transport.CUDA_IPC,
            )
            for each in (*opened.probes, *probes)
        }

    def read_on_device(self, profile: StudentProfile | None = None) -> str:
        opened = self.open(profile or wishing())
        self.prove_device(opened)
        return opened.terms.session_id

    def settlement(self, session_id: str, writer_id: str) -> Settlement:
        settlements = self.ledger.terms(session_id).settlements
        (found,) = [each for each in settlements if each.writer_id == writer_id]
        return found

    def hinted(self, publisher: Publisher, step: int) -> bool:
        """Whether the reply to a reservation, which is given up, says that a copy is needed."""
        reservation = self.reserve(publisher, step)
        self.ledger.abandon_payload(publisher.session_id, reservation.payload_id)
        return reservation.host_copy

    def seal_on_device(self, publisher: Publisher, payload_id: str, *, host_copy: bool) -> None:
        self.ledger.seal_payload(
            publisher.session_id,
            payload_id,
            extent=self.extent(publisher),
            bad_row_count=0,
            valid_count=None,
            host_copy=host_copy,
        )

    def register_on_device(
        self, publisher: Publisher, step: int, *, host_copy: bool = False
    ) -> str:
        payload_id = self.reserve(publisher, step).payload_id
        self.seal_on_device(publisher, payload_id, host_copy=host_copy)
        return payload_id


def refusal(reason: RefusalReason, writer_id: str = "") -> Refusal:
    return Refusal(transport=Transport.CUDA_IPC, reason=reason, message="no", writer_id=writer_id)
