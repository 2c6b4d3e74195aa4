"""Which transport a session comes to with each writer of device memory, and what it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.device_memory import DeviceProbe, ExportedMemory
from teacher_logits.errors import NoCommonTransportError, RequestInvalidError, SessionRefusedError
from teacher_logits.profiles import NodeHints
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import (
    PREFERENCE,
    Locality,
    Refusal,
    RefusalReason,
    Settlement,
    Transport,
    proof_of,
)
from teacher_logits_server.settlement import Wishes, settle_writer
from teacher_logits_server.settlement.device_offers import DeviceOffer
from teacher_logits_server.settlement.proofs import NOTHING_PROVEN, Proof, judge_devices

WRITER, OTHER = "publisher-0", "publisher-1"
NONCE = b"n" * 32
THEIRS, MINE = "GPU-writer", "GPU-reader"
ALL = frozenset({Transport.LOCAL, Transport.CUDA_IPC, Transport.SHARED_MEMORY, Transport.STREAM})
OF_DEVICES = [
    RefusalReason.NO_DEVICE,
    RefusalReason.OTHER_DEVICE,
    RefusalReason.NO_PEER_ACCESS,
    RefusalReason.OTHER_PID_NAMESPACE,
    RefusalReason.MIG,
    RefusalReason.DRIVER_FAILED,
    RefusalReason.DRIVER_SLOW,
    RefusalReason.DATA_DIFFERS,
    RefusalReason.OWN_HANDLE,
]
READER = NodeHints(
    host_name="reader-host", device_uuids=(MINE, "GPU-second"), namespaces={"pid": 402}
)
ON_NODE = Proof(proven=frozenset({Transport.SHARED_MEMORY}))


def offer(writer_id: str = WRITER) -> DeviceOffer:
    memory = ExportedMemory(
        handle=bytes(64), device_uuid=THEIRS, base_offset_bytes=0, allocation_bytes=4096
    )
    probe = DeviceProbe(writer_id=writer_id, memory=memory, pid_namespace=401, host="writer-host")
    return DeviceOffer(probe=probe, challenge=writer_id.encode().ljust(32, b"."))


def mac(writer_id: str) -> bytes:
    return proof_of(offer(writer_id).challenge, nonce=NONCE, transport=Transport.CUDA_IPC)


def failure(reason: RefusalReason, writer_id: str = WRITER, message: str = "not here") -> Refusal:
    return Refusal(
        transport=Transport.CUDA_IPC, reason=reason, message=message, writer_id=writer_id
    )


def shown(
    *failures: Refusal, proof: Proof = ON_NODE, proofs: dict[str, bytes] | None = None
) -> Proof:
    """A proof with what a client has sent of device memory."""
    return judge_devices(
        proof,
        nonce=NONCE,
        reader=READER,
        offers={each: offer(each) for each in (WRITER, OTHER)},
        proofs=proofs or {},
        failures=failures,
    )


def settled(
    proof: Proof,
    *wanted: Transport,
    locality: Locality = Locality.PREFER,
    writer_id: str = WRITER,
    device: bool = True,
    offered: frozenset[Transport] = ALL,
) -> Settlement:
    wishes = Wishes(transports=wanted or PREFERENCE, locality=locality, hints=READER)
    return settle_writer(
        wishes,
        proof,
        writer_id=writer_id,
        offered=offered,
        device=offer(writer_id) if device else None,
    )


def of_device(settlement: Settlement) -> Refusal:
    (refusal,) = [r for r in settlement.refusals if r.transport is Transport.CUDA_IPC]
    return refusal


class TestAReaderThatHasReadTheWritersDevice:
    def test_is_settled_there(self) -> None:
        settlement = settled(shown(proofs={WRITER: mac(WRITER)}))

        assert settlement.transport is Transport.CUDA_IPC
        assert settlement.probe is None

    def test_has_shown_nothing_of_another_writer(self) -> None:
        proof = shown(proofs={WRITER: mac(WRITER), OTHER: mac(WRITER)})

        assert settled(proof, writer_id=WRITER).transport is Transport.CUDA_IPC
        assert settled(proof, writer_id=OTHER).transport is Transport.SHARED_MEMORY
        assert of_device(settled(proof, writer_id=OTHER)).reason is RefusalReason.DATA_DIFFERS

    def test_reads_the_server_itself_as_ever(self) -> None:
        proof = shown(proofs={WRITER: mac(WRITER)})
        settlement = settled(proof, writer_id=SERVER_WRITER, device=False)

        assert settlement.transport is Transport.SHARED_MEMORY
        assert of_device(settlement).reason is RefusalReason.NOT_OFFERED

    def test_needs_its_line_too(self) -> None:
        why = Refusal(
            transport=Transport.SHARED_MEMORY,
            reason=RefusalReason.BROKER_UNREACHABLE,
            message="connect /there: no such file",
        )
        without = Proof(reasons={Transport.SHARED_MEMORY: why})
        settlement = settled(shown(proof=without, proofs={WRITER: mac(WRITER)}))

        assert settlement.transport is Transport.STREAM
        assert of_device(settlement).reason is RefusalReason.BROKER_UNREACHABLE
        assert "connect /there" in of_device(settlement).message
        assert settlement.probe is None

    def test_can_take_that_back(self) -> None:
        proof = shown(proofs={WRITER: mac(WRITER), OTHER: mac(OTHER)})
        proof = shown(failure(RefusalReason.DRIVER_FAILED), proof=proof)

        assert settled(proof).transport is Transport.SHARED_MEMORY
        assert settled(proof, writer_id=OTHER).transport is Transport.CUDA_IPC
        everything = shown(failure(RefusalReason.NO_DEVICE, ""), proof=proof)
        assert everything.devices == frozenset()


class TestAReaderThatCouldNot:
    @pytest.mark.parametrize("reason", OF_DEVICES, ids=lambda each: each.value)
    def test_shares_the_host_copies_and_is_told_its_own_words(self, reason: RefusalReason) -> None:
        words = f"the writer has {THEIRS}, and here are {MINE} and GPU-second"
        settlement = settled(shown(failure(reason, message=words)))

        assert settlement.transport is Transport.SHARED_MEMORY
        assert of_device(settlement) == failure(reason, message=words)
        assert settlement.probe is None  # it was tried

    def test_may_say_so_of_all_writers_at_once(self) -> None:
        proof = shown(
            failure(RefusalReason.NO_DEVICE, ""), failure(RefusalReason.DRIVER_SLOW, OTHER)
        )

        assert of_device(settled(proof)).reason is RefusalReason.NO_DEVICE
        assert of_device(settled(proof, writer_id=OTHER)).reason is RefusalReason.DRIVER_SLOW

    def test_is_told_of_both_sides_where_its_proof_is_wrong(self) -> None:
        refusal = of_device(settled(shown(proofs={WRITER: b"wrong"})))

        assert refusal.reason is RefusalReason.DATA_DIFFERS
        for word in (THEIRS, MINE, "GPU-second", "401", "402", "writer-host", "reader-host"):
            assert word in refusal.message

    def test_has_its_words_bounded(self) -> None:
        refusal = of_device(settled(shown(failure(RefusalReason.MIG, message="x" * 10_000))))

        assert len(refusal.message) == 600


class TestAReaderThatHasNotTried:
    def test_is_given_the_probe_and_told_of_both_sides(self) -> None:
        settlement = settled(ON_NODE)

        assert settlement.transport is Transport.SHARED_MEMORY
        assert settlement.probe == offer().probe
        assert of_device(settlement).reason is RefusalReason.PROOF_MISSING
        assert THEIRS in of_device(settlement).message
        assert MINE in of_device(settlement).message

    @pytest.mark.parametrize(
        "settlement",
        [
            settled(ON_NODE, Transport.SHARED_MEMORY, Transport.CUDA_IPC),
            settled(ON_NODE, Transport.SHARED_MEMORY),
            settled(ON_NODE, device=False),
            settled(ON_NODE, offered=ALL - {Transport.CUDA_IPC}),
            settled(NOTHING_PROVEN),
        ],
        ids=["wants it less", "does not want it", "no device", "not on offer", "no line"],
    )
    def test_is_given_none_that_would_not_help(self, settlement: Settlement) -> None:
        assert settlement.probe is None


class TestLocality:
    @pytest.mark.parametrize("locality", [Locality.REQUIRE, Locality.RULE])
    def test_is_kept_by_host_copies(self, locality: Locality) -> None:
        settlement = settled(shown(failure(RefusalReason.OTHER_DEVICE)), locality=locality)

        assert settlement.transport is Transport.SHARED_MEMORY

    def test_refuses_who_wants_the_device_alone_with_the_facts_of_both_sides(self) -> None:
        proof = shown(failure(RefusalReason.OTHER_DEVICE, message=f"{THEIRS} is not here"))
        with pytest.raises(SessionRefusedError) as refused:
            settled(proof, Transport.CUDA_IPC, locality=Locality.REQUIRE)

        assert refused.value.violations[0].rule == "not_proven_local"
        assert f"cuda_ipc OTHER_DEVICE: {THEIRS} is not here" in refused.value.message
        assert refused.value.facts == {
            "cuda_ipc": "OTHER_DEVICE",
            "writer_id": WRITER,
            "writer_device": THEIRS,
            "writer_pid_namespace": 401,
            "reader_devices": f"{MINE},GPU-second",
            "reader_pid_namespace": 402,
        }

    def test_that_is_preferred_names_what_else_would_do(self) -> None:
        with pytest.raises(NoCommonTransportError) as refused:
            settled(shown(failure(RefusalReason.MIG)), Transport.CUDA_IPC)

        assert "cuda_ipc MIG: not here" in refused.value.message
        assert "allow 'shared_memory' or 'stream'" in refused.value.message
        assert refused.value.facts["writer_device"] == THEIRS


@given(
    wanted=st.permutations(PREFERENCE).flatmap(
        lambda order: st.integers(1, len(order)).map(lambda count: tuple(order[:count]))
    ),
    offered=st.sets(st.sampled_from(Transport)).map(frozenset),
    has_line=st.booleans(),
    has_device=st.booleans(),
    said=st.sampled_from(["nothing", "proof", "wrong", "failure", "failure of all"]),
)
def test_the_first_that_is_wanted_offered_and_proven_is_settled(
    *,
    wanted: tuple[Transport, ...],
    offered: frozenset[Transport],
    has_line: bool,
    has_device: bool,
    said: str,
) -> None:
    failures = {
        "failure": (failure(RefusalReason.MIG),),
        "failure of all": (failure(RefusalReason.NO_DEVICE, ""),),
    }
    proofs = {"proof": {WRITER: mac(WRITER)}, "wrong": {WRITER: mac(OTHER)}}
    proof = shown(
        *failures.get(said, ()),
        proof=ON_NODE if has_line else NOTHING_PROVEN,
        proofs=proofs.get(said, {}),
    )
    can = {
        Transport.CUDA_IPC: has_line and has_device and said == "proof",
        Transport.SHARED_MEMORY: has_line,
        Transport.STREAM: True,
    }
    expected = next((each for each in wanted if each in offered and can.get(each)), None)

    try:
        settlement = settled(proof, *wanted, device=has_device, offered=offered)
    except NoCommonTransportError:
        assert expected is None
    else:
        assert settlement.transport is expected
        before = wanted[: wanted.index(settlement.transport)]
        assert tuple(each.transport for each in settlement.refusals) == before


def test_an_offer_has_a_challenge_of_the_right_size() -> None:
    with pytest.raises(RequestInvalidError, match="has 31 bytes; give 32 random ones"):
        replace(offer(), challenge=bytes(31))


class TestAReaderOfTheServersRayCluster:
    RAY = Transport.RAY_OBJECT
    OFFERED = ALL | {Transport.RAY_OBJECT}
    IN_CLUSTER = Proof(proven=frozenset({Transport.RAY_OBJECT}))

    @pytest.mark.parametrize("writer_id", [SERVER_WRITER, WRITER])
    def test_has_objects_of_the_server_and_of_publishers(self, writer_id: str) -> None:
        settlement = settled(
            self.IN_CLUSTER, writer_id=writer_id, device=False, offered=self.OFFERED
        )

        assert settlement.transport is self.RAY

    def test_maps_what_it_shares_memory_with_all_the_same(self) -> None:
        both = Proof(proven=frozenset({self.RAY, Transport.SHARED_MEMORY}))
        settlement = settled(both, device=False, offered=self.OFFERED)

        assert settlement.transport is Transport.SHARED_MEMORY

    def test_is_streamed_to_until_it_has_proven_that_it_is(self) -> None:
        settlement = settled(NOTHING_PROVEN, device=False, offered=self.OFFERED)
        [refusal] = [each for each in settlement.refusals if each.transport is self.RAY]

        assert settlement.transport is Transport.STREAM
        assert refusal.reason is RefusalReason.PROOF_MISSING
        assert "where the objects are" in refusal.message

    def test_shares_no_memory_with_anybody_by_that(self) -> None:
        with pytest.raises(SessionRefusedError, match="not_proven_local"):
            settled(self.IN_CLUSTER, device=False, offered=self.OFFERED, locality=Locality.REQUIRE)
