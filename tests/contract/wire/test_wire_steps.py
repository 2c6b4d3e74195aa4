"""Steps, mail and reservations cross the wire whole, and what cannot be read is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.device_memory import DeviceProbe, ExportedMemory
from teacher_logits.errors import ProducerLostError, RequestInvalidError
from teacher_logits.layout import ElementType, top_k_columns
from teacher_logits.payload import Extent, Payload
from teacher_logits.terms import (
    LeaseTerms,
    Reservation,
    RoomFreed,
    SlabsGone,
    StepFailure,
    StepGrant,
    WritersCame,
)
from teacher_logits.transport import Refusal, RefusalReason, Settlement, Transport
from teacher_logits.v1 import line_pb2, payload_pb2
from teacher_logits.wire import steps as wire_steps

if TYPE_CHECKING:
    from teacher_logits.terms import Mail

steps = st.integers(0, 2**62)


def lease(number: int, *, in_slab: bool) -> LeaseTerms:
    columns, size_bytes = top_k_columns(
        row_count=1, position_count=2, top_k=2, temperature_count=1, value_type=ElementType.FLOAT32
    )
    payload = Payload(
        payload_id=f"p-{number}",
        teacher_id="t",
        teacher_revision="r",
        first_row=number,
        row_count=1,
        position_count=2,
        top_k=2,
        temperatures=(1.0,),
        vocabulary_size=9,
        columns=columns,
        size_bytes=size_bytes,
    )
    extent = Extent(
        slab_id="s", offset_bytes=4096 * number, size_bytes=8192, slot=number, generation=2
    )
    return LeaseTerms(
        lease_id=f"l-{number}",
        payload=payload,
        writer_id="publisher-0",
        extent=extent if in_slab else None,
    )


grants = st.builds(
    StepGrant,
    step=steps,
    leases=st.lists(st.booleans(), max_size=3).map(
        lambda kinds: tuple(lease(i, in_slab=kind) for i, kind in enumerate(kinds))
    ),
    real_rows=st.integers(0, 2**31),
    global_count=st.none() | st.integers(0, 2**40),
    settlements=st.sampled_from(
        [
            (),
            (
                Settlement(
                    writer_id="publisher-0",
                    transport=Transport.STREAM,
                    refusals=(
                        Refusal(
                            transport=Transport.SHARED_MEMORY,
                            reason=RefusalReason.PROOF_MISSING,
                            message="no",
                        ),
                    ),
                ),
            ),
        ]
    ),
)
freed = st.builds(
    RoomFreed,
    payload_ids=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    lowest_open_step=steps,
)


gone = st.builds(SlabsGone, slab_ids=st.lists(st.text(max_size=8), max_size=3).map(tuple))


came = st.builds(
    WritersCame,
    probes=st.lists(
        st.builds(
            DeviceProbe,
            writer_id=st.text(max_size=8),
            memory=st.builds(
                ExportedMemory,
                handle=st.binary(min_size=64, max_size=64),
                device_uuid=st.just("GPU-0"),
                base_offset_bytes=st.just(256),
                allocation_bytes=st.integers(288, 1 << 40),
            ),
            pid_namespace=st.integers(0, 2**64 - 1),
            host=st.text(max_size=8),
        ),
        max_size=3,
    ).map(tuple),
)


@given(grants | freed | gone | came)
def test_what_is_sent_ahead_arrives_whole_and_answers_no_call(mail: Mail) -> None:
    packet = wire_steps.mail_to_wire(mail).SerializeToString()
    arrived = line_pb2.LineReply.FromString(packet)
    assert arrived.call_id == 0
    assert wire_steps.mail_from_wire(arrived) == mail


def test_a_step_that_cannot_be_had_arrives_with_its_error() -> None:
    error = ProducerLostError("the publisher of shard 1 died", facts={"shard": 1})
    sent = wire_steps.mail_to_wire(StepFailure(step=7, error=error))
    arrived = wire_steps.mail_from_wire(sent)
    assert isinstance(arrived, StepFailure)
    assert arrived.step == 7
    assert isinstance(arrived.error, ProducerLostError)
    assert (arrived.error.message, arrived.error.facts) == (error.message, error.facts)


@given(
    st.builds(
        Reservation,
        payload_id=st.text(max_size=8),
        is_repeat=st.booleans(),
        lowest_open_step=steps,
    )
)
def test_a_reservation_arrives_whole(reservation: Reservation) -> None:
    sent = wire_steps.reservation_to_wire(reservation)
    assert wire_steps.reservation_from_wire(sent) == reservation


@pytest.mark.parametrize("status", [b"\xff", b"\x08\x05"], ids=["no status", "not ours"])
def test_a_failure_that_cannot_be_read_is_refused(status: bytes) -> None:
    with pytest.raises(RequestInvalidError, match="step 3"):
        wire_steps.grant_from_wire(payload_pb2.StepGrant(step=3, status=status))


def test_mail_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RequestInvalidError, match="renew"):
        wire_steps.mail_from_wire(line_pb2.LineReply(renew={}))
