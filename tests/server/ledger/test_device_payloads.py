"""Payloads in device memory: who is settled to read them there, and who needs host copies."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.ledger.device_rig import (
    UUID,
    WANTED,
    DeviceHouse,
    part,
    refusal,
    wishing,
)
from tests.server.ledger.registering import SLAB, student, teacher

from teacher_logits.errors import (
    HostCopyNeededError,
    NotAllowedError,
    PayloadConflictError,
    ProducerLostError,
    SessionRefusedError,
)
from teacher_logits.terms import StepFailure, StepGrant, WritersCame
from teacher_logits.transport import Locality, RefusalReason, Transport

if TYPE_CHECKING:
    from tests.server.ledger.registering import Publisher

    from teacher_logits_server.ledger import OpenedSession


@pytest.fixture
def house() -> DeviceHouse:
    return DeviceHouse()


class TestAStudent:
    def test_is_shown_the_probe_of_every_writer_that_it_needs(self, house: DeviceHouse) -> None:
        writers = [house.publish_on_device(teacher(dp=2, shard=shard)) for shard in (0, 1)]

        first, whole = house.open(wishing(dp=2)), house.open(wishing(student_id="whole"))
        assert [each.writer_id for each in first.probes] == [writers[0].writer_id]
        assert [each.writer_id for each in whole.probes] == [each.writer_id for each in writers]
        assert whole.probes[0].memory.device_uuid == UUID

    def test_that_wants_no_device_memory_is_shown_none(self, house: DeviceHouse) -> None:
        house.publish_on_device()

        assert house.open(student(transports=(Transport.SHARED_MEMORY,))).probes == ()

    def test_is_settled_on_it_writer_by_writer(self, house: DeviceHouse) -> None:
        on_device = house.publish_on_device(teacher(dp=2, shard=0))
        on_host = house.publish_as(teacher(dp=2, shard=1))
        reader = house.read_on_device()

        assert house.settlement(reader, on_device.writer_id).transport is Transport.CUDA_IPC
        assert house.settlement(reader, on_host.writer_id).transport is Transport.SHARED_MEMORY

    def test_reads_on_the_device_what_lies_there(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        house.register_on_device(publisher, 0)
        (lease,) = house.take(reader, 0).leases

        assert lease.on_device
        assert lease.extent is not None
        assert lease.extent.slab_id == publisher.slab_id

    def test_that_cannot_open_it_reads_the_host_copy(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        opened = house.open(wishing())
        house.prove_device(opened, devices=False, why=RefusalReason.OTHER_DEVICE)
        house.register_on_device(publisher, 0, host_copy=True)
        (lease,) = house.take(opened.terms.session_id, 0).leases

        assert not lease.on_device
        assert lease.extent is not None

    def test_elsewhere_is_streamed_a_copy_without_gaps(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        opened = house.open(wishing())
        house.prove_device(opened, devices=False, line=False)
        payload_id = house.register_on_device(publisher, 0, host_copy=True)
        (lease,) = house.take(opened.terms.session_id, 0).leases

        assert lease.extent is None
        with house.ledger.pin(opened.terms.session_id, lease.lease_id) as pinned:
            assert pinned.payload.payload_id == payload_id
            assert len(pinned.segments) == len(pinned.payload.columns)

    def test_that_insists_on_locality_is_content_with_host_copies(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        opened = house.open(wishing(locality=Locality.REQUIRE))
        house.prove_device(opened, devices=False, why=RefusalReason.NO_DEVICE)

        settlement = house.settlement(opened.terms.session_id, publisher.writer_id)
        assert settlement.transport is Transport.SHARED_MEMORY

    def test_that_wants_nothing_else_and_cannot_open_it_is_refused(
        self, house: DeviceHouse
    ) -> None:
        house.publish_on_device()
        profile = wishing(transports=(Transport.CUDA_IPC,), locality=Locality.REQUIRE)
        with pytest.raises(SessionRefusedError) as refused:
            house.prove_device(house.open(profile), devices=False, why=RefusalReason.NO_PEER_ACCESS)

        assert refused.value.facts["cuda_ipc"] == "NO_PEER_ACCESS"
        assert refused.value.facts["writer_device"] == UUID


class TestALaterWriter:
    def late(self, house: DeviceHouse) -> tuple[str, Publisher, Publisher]:
        """A reader that has read shard 0's device, and a new writer of it."""
        first = house.publish_on_device()
        opened = house.open(wishing())
        house.prove_device(opened)
        house.ledger.close_session(first.session_id)
        self.opened = opened
        return opened.terms.session_id, first, house.publish_on_device()

    def test_is_settled_on_host_copies_with_its_probe(self, house: DeviceHouse) -> None:
        reader, _, second = self.late(house)
        assert house.hinted(second, 0)
        house.register_on_device(second, 0, host_copy=True)
        grant = house.take(reader, 0)

        (told,) = grant.settlements
        assert told.transport is Transport.SHARED_MEMORY
        assert told.probe is not None
        assert told.probe.writer_id == second.writer_id
        assert [lease.on_device for lease in grant.leases] == [False]

    def test_is_read_on_its_device_once_that_was_proven(self, house: DeviceHouse) -> None:
        reader, _, second = self.late(house)
        house.register_on_device(second, 0, host_copy=True)
        (told,) = house.take(reader, 0).settlements
        assert told.probe is not None
        macs = house.macs(self.opened, told.probe)
        house.ledger.prove_locality(reader, proofs={}, failures=[], device_proofs=macs)

        settlement = house.settlement(reader, second.writer_id)
        assert settlement.transport is Transport.CUDA_IPC
        assert settlement.probe is None
        assert not house.hinted(second, 1)
        house.register_on_device(second, 1)
        assert [lease.on_device for lease in house.take(reader, 1).leases] == [True]

    def test_that_could_not_be_opened_shows_its_probe_no_more(self, house: DeviceHouse) -> None:
        reader, _, second = self.late(house)
        house.register_on_device(second, 0, host_copy=True)
        house.take(reader, 0)
        why = refusal(RefusalReason.DRIVER_SLOW, second.writer_id)
        house.ledger.prove_locality(reader, proofs={}, failures=[why])

        settlement = house.settlement(reader, second.writer_id)
        assert settlement.transport is Transport.SHARED_MEMORY
        assert settlement.refusals[0] == why
        assert settlement.probe is None

    def test_is_told_with_the_step_that_is_granted_and_not_with_one_that_was_not(
        self, house: DeviceHouse
    ) -> None:
        first, second = (house.publish_on_device(teacher(dp=2, shard=s)) for s in (0, 1))
        reader = house.read_on_device()
        house.ledger.close_session(second.session_id)
        later = house.publish_on_device(teacher(dp=2, shard=1))
        house.register_on_device(first, 0)
        house.register_on_device(later, 0, host_copy=True)
        why = refusal(RefusalReason.DRIVER_FAILED, first.writer_id)
        house.ledger.prove_locality(reader, proofs={}, failures=[why])
        with pytest.raises(HostCopyNeededError, match="shard 0 of step 0"):
            house.take(reader, 0)
        for publisher in (first, later):
            house.register_on_device(publisher, 1, host_copy=True)

        assert [told.writer_id for told in house.take(reader, 1).settlements] == [later.writer_id]


class TestAStudentThatReadsDevicesAlone:
    """It can read a writer that comes later in no other way."""

    PROFILE = wishing(transports=(Transport.CUDA_IPC,), locality=Locality.REQUIRE)

    def waiting(self, house: DeviceHouse) -> tuple[OpenedSession, Publisher]:
        """One that wants step 0 of a writer that has come since."""
        first = house.publish_on_device()
        opened = house.open(self.PROFILE)
        house.prove_device(opened)
        house.ledger.close_session(first.session_id)
        return opened, house.publish_on_device()

    def test_is_told_of_the_writer_as_it_comes(self, house: DeviceHouse) -> None:
        opened, later = self.waiting(house)
        (came,) = house.ledger.take_mail(opened.terms.session_id)

        assert isinstance(came, WritersCame)
        assert [probe.writer_id for probe in came.probes] == [later.writer_id]
        assert house.ledger.take_mail(opened.terms.session_id) == []

    @pytest.mark.parametrize("by_mail", [True, False])
    def test_is_granted_its_steps_once_it_has_proven_it(
        self, house: DeviceHouse, *, by_mail: bool
    ) -> None:
        opened, later = self.waiting(house)
        reader = opened.terms.session_id
        (came,) = house.ledger.take_mail(reader)
        assert isinstance(came, WritersCame)
        house.register_on_device(later, 0, host_copy=True)
        house.ledger.want_steps(reader, 0, 1)
        assert house.mail(reader) == []
        assert house.ledger.take_step(reader, house.name(), 0) is None
        house.ledger.prove_locality(
            reader, proofs={}, failures=[], device_proofs=house.macs(opened, *came.probes)
        )

        (grant,) = house.mail(reader) if by_mail else [house.take(reader, 0)]
        assert isinstance(grant, StepGrant)
        assert [lease.on_device for lease in grant.leases] == [True]
        (told,) = grant.settlements  # the answer to its proof may come behind the step
        assert told.transport is Transport.CUDA_IPC

    def test_is_refused_them_once_it_could_not(self, house: DeviceHouse) -> None:
        opened, later = self.waiting(house)
        reader = opened.terms.session_id
        house.register_on_device(later, 0, host_copy=True)
        house.ledger.want_steps(reader, 0, 1)
        why = refusal(RefusalReason.DRIVER_SLOW, later.writer_id)
        house.ledger.prove_locality(reader, proofs={}, failures=[why])

        (failure,) = house.mail(reader)
        assert isinstance(failure, StepFailure)
        assert failure.error.facts["cuda_ipc"] == "DRIVER_SLOW"

    def test_is_not_told_of_a_writer_of_others_rows(self, house: DeviceHouse) -> None:
        house.publish_on_device(teacher(dp=2, shard=0))
        second = house.publish_on_device(teacher(dp=2, shard=1))
        opened = house.open(wishing(dp=2, rank=0))
        house.prove_device(opened)
        house.ledger.close_session(second.session_id)
        house.publish_on_device(teacher(dp=2, shard=1))  # writes none of its rows

        assert house.ledger.take_mail(opened.terms.session_id) == []


class TestAReaderWhoseDeviceBreaks:
    def test_needs_host_copies_from_then_on(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        assert not house.hinted(publisher, 0)
        why = refusal(RefusalReason.DRIVER_FAILED, publisher.writer_id)
        house.ledger.prove_locality(reader, proofs={}, failures=[why])

        assert house.hinted(publisher, 0)
        settlement = house.settlement(reader, publisher.writer_id)
        assert settlement.transport is Transport.SHARED_MEMORY
        assert settlement.refusals[0] == why

    def test_is_told_which_payload_lies_there_alone(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        house.register_on_device(publisher, 0)
        why = refusal(RefusalReason.DRIVER_FAILED, publisher.writer_id)
        house.ledger.prove_locality(reader, proofs={}, failures=[why])

        with pytest.raises(HostCopyNeededError) as told:
            house.take(reader, 0)
        assert told.value.facts["step"] == 0
        assert "shard 0 of step 0" in told.value.message
        assert "cuda_ipc DRIVER_FAILED: no" in told.value.message

    def test_is_not_streamed_what_is_no_copy(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        house.register_on_device(publisher, 0)
        (lease,) = house.take(reader, 0).leases
        with (
            pytest.raises(HostCopyNeededError, match="alone, and cannot be streamed"),
            house.ledger.pin(reader, lease.lease_id),
        ):
            pass

    def test_may_stream_a_copy_with_nothing_between_its_columns(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        house.register_on_device(publisher, 0, host_copy=True)
        (lease,) = house.take(reader, 0).leases
        assert lease.on_device
        with house.ledger.pin(reader, lease.lease_id) as pinned:
            assert pinned.payload == lease.payload
            assert [(s.source_offset_bytes, s.size_bytes) for s in pinned.segments] == [
                (column.offset_bytes, column.size_bytes) for column in lease.payload.columns
            ]

    def test_keeps_its_room_by_its_line_though_it_streams_from_then_on(
        self, house: DeviceHouse
    ) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device(wishing(transports=(Transport.CUDA_IPC, Transport.STREAM)))
        house.register_on_device(publisher, 0)
        house.take(reader, 0)
        house.ledger.prove_locality(
            reader, proofs={}, failures=[refusal(RefusalReason.DRIVER_FAILED)]
        )
        assert house.settlement(reader, publisher.writer_id).transport is Transport.STREAM

        (view,) = [s for s in house.ledger.view().sessions if s.session_id == reader]
        assert view.liveness == "line"
        house.ledger.line_ended(reader, process_alive=True)
        (lease,) = house.ledger.view().leases
        assert lease.quarantined


class TestAHostCopy:
    def test_is_needed_where_nobody_has_come_yet(self, house: DeviceHouse) -> None:
        assert house.hinted(house.publish_on_device(), 0)

    def test_is_not_needed_where_all_can_open_the_device(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        house.read_on_device()

        assert not house.hinted(publisher, 0)

    def test_is_needed_while_one_has_not_settled(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        house.read_on_device()
        opened = house.open(wishing(student_id="other"))
        assert house.hinted(publisher, 0)

        house.prove_device(opened)
        assert not house.hinted(publisher, 0)

    def test_is_needed_of_the_rows_alone_that_are_read_from_the_host(
        self, house: DeviceHouse
    ) -> None:
        first, second = (house.publish_on_device(teacher(dp=2, shard=s)) for s in (0, 1))
        house.read_on_device(wishing(dp=2, rank=0))
        house.prove_device(house.open(wishing(dp=2, rank=1)), devices=False)

        assert not house.hinted(first, 0)
        assert house.hinted(second, 0)

    @pytest.mark.parametrize("end", ["closes", "dies", "lapses"])
    def test_is_not_needed_for_a_reader_that_is_gone(self, house: DeviceHouse, end: str) -> None:
        publisher = house.publish_on_device()
        house.read_on_device()
        opened = house.open(wishing(student_id="other"))
        reader = opened.terms.session_id
        house.prove_device(opened, devices=False, line=end != "lapses")
        assert house.hinted(publisher, 0)

        if end == "closes":
            house.ledger.close_session(reader)
        elif end == "dies":
            house.ledger.line_ended(reader, process_alive=False)
        else:
            house.clock.advance(31)
        assert not house.hinted(publisher, 0)

    def test_is_not_needed_of_what_lies_on_the_host(self, house: DeviceHouse) -> None:
        assert not house.hinted(house.publish_as(teacher(dp=1)), 0)

    def test_that_is_needed_and_missing_refuses_the_seal_and_not_the_reservation(
        self, house: DeviceHouse
    ) -> None:
        publisher = house.publish_on_device()
        payload_id = house.reserve(publisher, 0).payload_id
        extent = house.extent(publisher)

        def seal(*, host_copy: bool) -> None:
            house.ledger.seal_payload(
                publisher.session_id,
                payload_id,
                extent=extent,
                bad_row_count=0,
                valid_count=None,
                host_copy=host_copy,
            )

        with pytest.raises(HostCopyNeededError, match=payload_id):
            seal(host_copy=False)
        seal(host_copy=True)
        reader = house.read_on_device()
        assert [lease.on_device for lease in house.take(reader, 0).leases] == [True]

    def test_that_nobody_needs_is_fine(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        house.read_on_device()
        house.register_on_device(publisher, 0, host_copy=True)

    def test_that_was_not_made_is_missed_by_who_comes_later(self, house: DeviceHouse) -> None:
        first, second = (house.publish_on_device(teacher(dp=2, shard=s)) for s in (0, 1))
        house.read_on_device()
        house.register_on_device(first, 0)
        opened = house.open(wishing(student_id="late"))
        late = opened.terms.session_id
        house.prove_device(opened, devices=False, why=RefusalReason.NO_DEVICE)
        house.register_on_device(second, 0, host_copy=True)

        with pytest.raises(HostCopyNeededError, match="shard 0 of step 0"):
            house.take(late, 0)
        assert house.ledger.view().leases == ()  # the other shard is not leased either
        settlements = {s.writer_id for s in house.ledger.terms(late).settlements}
        assert settlements == {first.writer_id, second.writer_id}


class TestAStepThatAReaderCanNeverRead:
    def blind(self, house: DeviceHouse) -> str:
        """A reader that comes late, and opens no device."""
        opened = house.open(wishing(student_id="late"))
        house.prove_device(opened, devices=False, why=RefusalReason.NO_DEVICE)
        return opened.terms.session_id

    def stages(self, house: DeviceHouse) -> dict[int, tuple[str, ...]]:
        """Whom each step waits for."""
        return {step.step: step.waits_for for step in house.ledger.view().steps}

    def test_does_not_wait_for_it_if_it_was_complete_before_it_came(
        self, house: DeviceHouse
    ) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        payload_id = house.register_on_device(publisher, 0)
        late = self.blind(house)
        assert self.stages(house) == {0: ("student:0",)}
        with pytest.raises(HostCopyNeededError):
            house.take(late, 0)
        house.give_back(reader, house.take(reader, 0))

        assert house.hear(publisher) == (payload_id,)
        house.register_on_device(publisher, 1, host_copy=True)
        assert self.stages(house) == {1: ("student:0", "late:0")}

    def test_does_not_wait_for_it_if_it_is_complete_later(self, house: DeviceHouse) -> None:
        first, second = (house.publish_on_device(teacher(dp=2, shard=s)) for s in (0, 1))
        house.read_on_device()
        house.register_on_device(first, 0)
        self.blind(house)
        assert self.stages(house) == {0: ("student:0", "late:0")}  # it is not complete
        house.register_on_device(second, 0, host_copy=True)

        assert self.stages(house) == {0: ("student:0",)}

    def test_does_not_wait_for_one_whose_device_broke(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        house.read_on_device(wishing(student_id="other"))
        house.register_on_device(publisher, 0)
        why = refusal(RefusalReason.DRIVER_FAILED, publisher.writer_id)
        house.ledger.prove_locality(reader, proofs={}, failures=[why])

        assert self.stages(house) == {0: ("other:0",)}

    def test_waits_for_those_whose_rows_lie_elsewhere(self, house: DeviceHouse) -> None:
        first, second = (house.publish_on_device(teacher(dp=2, shard=s)) for s in (0, 1))
        for rank in (0, 1):
            house.read_on_device(wishing(dp=2, rank=rank))
        house.register_on_device(first, 0)
        house.register_on_device(second, 0, host_copy=True)
        opened = house.open(wishing(dp=2, rank=1, student_id="late"))
        house.prove_device(opened, devices=False)

        assert "late:1" in self.stages(house)[0]


class TestAWriterThatIsGone:
    def test_leaves_what_has_host_copies(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        house.register_on_device(publisher, 0, host_copy=True)
        house.ledger.close_session(publisher.session_id)
        (lease,) = house.take(reader, 0).leases

        assert not lease.on_device
        assert lease.extent is not None

    @pytest.mark.parametrize("in_good_order", [True, False])
    def test_takes_with_it_what_lay_in_its_device_memory_alone(
        self, house: DeviceHouse, *, in_good_order: bool
    ) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        house.register_on_device(publisher, 0)
        if in_good_order:
            house.ledger.close_session(publisher.session_id)
        else:
            house.ledger.line_ended(publisher.session_id, process_alive=False)

        with pytest.raises(ProducerLostError):
            house.take(reader, 0)

    def test_leaves_who_has_leased_it_alone(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        readers = [house.read_on_device(wishing(student_id=name)) for name in ("one", "two")]
        house.register_on_device(publisher, 0)
        grant = house.take(readers[0], 0)
        house.ledger.close_session(publisher.session_id)

        with pytest.raises(ProducerLostError, match="which is gone, and no host copy was made"):
            house.take(readers[1], 0)
        house.give_back(readers[0], grant)

    def test_amid_a_handshake_is_waited_for_as_long_as_the_call_may(
        self, house: DeviceHouse
    ) -> None:
        """Longer than a session may stay unsettled of which nothing is heard."""
        publisher = house.publish_on_device()
        opened = house.open(wishing())
        session_id = opened.terms.session_id
        house.ledger.line_ended(publisher.session_id, process_alive=False)
        assert house.ledger.lacks_writers(session_id, patience=30)
        house.clock.advance(29)
        house.ledger.sweep()
        assert house.ledger.lacks_writers(session_id, patience=1)

        house.publish_on_device()
        assert not house.ledger.lacks_writers(session_id, patience=1)
        assert house.prove_device(opened).settlements

    def test_amid_a_handshake_ends_it_once_nobody_waits_any_more(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        session_id = house.open(wishing()).terms.session_id
        house.ledger.line_ended(publisher.session_id, process_alive=False)
        assert house.ledger.lacks_writers(session_id, patience=30)

        house.clock.advance(30)
        assert house.ledger.sweep() == [session_id]


class TestASlabOfDeviceMemory:
    def test_shows_its_handle_to_those_that_read_there(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        seeing = house.read_on_device()
        opened = house.open(wishing(student_id="blind"))
        house.prove_device(opened, devices=False)

        assert house.ledger.device_part(seeing, publisher.slab_id) == part()
        assert house.ledger.device_part(opened.terms.session_id, publisher.slab_id) is None
        assert house.ledger.device_part("nobody", publisher.slab_id) is None

    def test_is_shown_to_who_inspects(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        reader = house.read_on_device()
        house.register_on_device(publisher, 0)
        house.ledger.may_open(reader, publisher.slab_id)

        (slab,) = house.ledger.view().registered.device_slabs
        assert slab.device_uuid == UUID
        assert (slab.writer_id, slab.session_id) == (publisher.writer_id, publisher.session_id)
        assert slab.size_bytes == SLAB
        assert slab.reader_count == 1
        assert 0 < slab.used_bytes < 4096

    def test_is_for_publishers_with_a_probe(self, house: DeviceHouse) -> None:
        publisher = house.publish_as(teacher(dp=1))
        with pytest.raises(NotAllowedError, match="opened with a probe"):
            house.ledger.add_foreign_slab(publisher.session_id, "more", SLAB, device=part())

    def test_is_for_servers_that_pass_device_memory_on(self) -> None:
        house = DeviceHouse(offered=frozenset(WANTED) - {Transport.CUDA_IPC})
        with pytest.raises(NotAllowedError, match="cuda_ipc among its --transports"):
            house.publish_on_device()

    def test_lies_on_the_device_of_the_probe(self, house: DeviceHouse) -> None:
        publisher = house.publish_on_device()
        with pytest.raises(NotAllowedError, match="one publisher a device"):
            house.ledger.add_foreign_slab(
                publisher.session_id, "more", SLAB, device=part("GPU-another")
            )

    def test_is_none_of_a_publisher_that_streams(self, house: DeviceHouse) -> None:
        house.publish_on_device(local=False)

        assert house.open(wishing()).probes == ()


def test_a_repeat_of_what_lies_in_device_memory_alone_is_not_taken(house: DeviceHouse) -> None:
    publisher = house.publish_on_device()
    house.read_on_device()
    house.register_on_device(publisher, 0)
    repeat = house.reserve(publisher, 0)
    assert repeat.is_repeat

    with (
        pytest.raises(PayloadConflictError, match="cannot tell whether these are the same"),
        house.ledger.pin_repeated(publisher.session_id, repeat.payload_id),
    ):
        pass


moves = st.lists(
    st.tuples(st.sampled_from(["open", "see", "miss", "break", "close"]), st.integers(0, 2)),
    max_size=12,
)


class Readers:
    """Three places for students, and which of those there have opened the writer's device."""

    def __init__(self, house: DeviceHouse, writer_id: str) -> None:
        self._house = house
        self._writer_id = writer_id
        self._names = itertools.count()
        self._opened: dict[int, OpenedSession] = {}
        self._settled: dict[int, bool] = {}

    @property
    def need_copies(self) -> bool:
        """Whether somebody is there who has not, or nobody at all."""
        sees = [self._settled.get(who, False) for who in self._opened]
        return not sees or not all(sees)

    def move(self, what: str, who: int) -> None:
        """Do something, where it can be done."""
        opened = self._opened.get(who)
        if opened is None:
            if what == "open":
                profile = wishing(student_id=f"student{next(self._names)}")
                self._opened[who] = self._house.open(profile)
        elif what in ("see", "miss") and who not in self._settled:
            self._house.prove_device(opened, devices=what == "see")
            self._settled[who] = what == "see"
        elif what == "break" and who in self._settled:
            why = refusal(RefusalReason.DRIVER_FAILED, self._writer_id)
            self._house.ledger.prove_locality(opened.terms.session_id, proofs={}, failures=[why])
            self._settled[who] = False
        elif what == "close":
            self._house.ledger.close_session(opened.terms.session_id)
            del self._opened[who]
            self._settled.pop(who, None)


@settings(max_examples=60, deadline=None)
@given(moves=moves)
def test_a_seal_is_refused_exactly_while_a_reader_needs_the_copy_that_it_lacks(
    moves: list[tuple[str, int]],
) -> None:
    house = DeviceHouse()
    publisher = house.publish_on_device()
    readers = Readers(house, publisher.writer_id)
    for step, (what, who) in enumerate(moves):
        readers.move(what, who)
        reservation = house.reserve(publisher, step)
        assert reservation.host_copy == readers.need_copies
        try:
            house.seal_on_device(publisher, reservation.payload_id, host_copy=False)
        except HostCopyNeededError:
            assert readers.need_copies
            house.ledger.abandon_payload(publisher.session_id, reservation.payload_id)
        else:
            assert not readers.need_copies
