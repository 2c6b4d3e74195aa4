"""Announced steps through the ledger: told before they are sealed, then granted or taken back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.server.ledger.device_rig import DeviceHouse, wishing
from tests.server.ledger.registering import House, Limits, Publisher, student, teacher

from teacher_logits.errors import (
    HostCopyNeededError,
    PayloadInvalidError,
    ReservationLapsedError,
)
from teacher_logits.terms import RoomFreed, StepGrant, StepWithdrawn

if TYPE_CHECKING:
    from teacher_logits.payload import Extent


@pytest.fixture
def house() -> House:
    return House()


def announce(
    house: House, publisher: Publisher, step: int, *, valid_count: int | None = None
) -> tuple[str, Extent]:
    """Reserve a publisher's rows of a step and say where they will lie."""
    payload_id = house.reserve(publisher, step).payload_id
    extent = house.extent(publisher)
    house.ledger.announce_payload(
        publisher.session_id, payload_id, extent=extent, valid_count=valid_count
    )
    return payload_id, extent


def told(house: House, session_id: str) -> list[StepGrant | StepWithdrawn]:
    mail = house.ledger.take_mail(session_id)
    return [each for each in mail if isinstance(each, StepGrant | StepWithdrawn)]


class TestAnAnnouncedStep:
    def test_is_told_with_every_place_that_it_awaits_and_the_leases_of_this_rank(
        self, house: House
    ) -> None:
        publishers = house.publishers()
        reader = house.read_as(student(dp=2, rank=1))
        house.ledger.want_steps(reader, 0, 1)
        _, first = announce(house, publishers[0], 0, valid_count=3)
        assert told(house, reader) == []
        mine, second = announce(house, publishers[1], 0, valid_count=4)

        (terms,) = told(house, reader)
        assert isinstance(terms, StepGrant)
        assert terms.awaited == (first, second)
        assert [(lease.payload.payload_id, lease.extent) for lease in terms.leases] == [
            (mine, second)
        ]
        assert terms.global_count == 7
        assert told(house, reader) == []

    def test_is_leased_when_it_is_sealed_under_the_ids_that_were_told(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        payload_id, extent = announce(house, publisher, 0)
        (terms,) = told(house, reader)
        assert isinstance(terms, StepGrant)
        assert house.ledger.lease_count() == 0
        house.seal(publisher, payload_id, extent=extent)

        assert told(house, reader) == []
        assert house.ledger.lease_count() == 1
        house.give_back(reader, terms)
        assert house.hear(publisher) == (payload_id,)

    def test_whose_seal_was_seen_may_be_read_and_retired_before_its_writer_says_it(
        self, house: House
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        payload_id, extent = announce(house, publisher, 0)
        (terms,) = told(house, reader)
        assert isinstance(terms, StepGrant)
        house.seal(publisher, payload_id, extent=extent, is_said=False)
        house.give_back(reader, terms)
        assert house.hear(publisher) == (payload_id,)

        house.seal(publisher, payload_id, extent=extent)
        with pytest.raises(ReservationLapsedError):  # once: nothing is kept for ever
            house.seal(publisher, payload_id, extent=extent)

    def test_may_be_sealed_in_part_before_the_rest_is_announced(self, house: House) -> None:
        publishers = house.publishers()
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        first = house.reserve(publishers[0], 0).payload_id
        lies_at = house.extent(publishers[0])
        house.seal(publishers[0], first, extent=lies_at)
        _, second = announce(house, publishers[1], 0)

        (terms,) = told(house, reader)
        assert isinstance(terms, StepGrant)
        assert terms.awaited == (lies_at, second)

    def test_is_not_told_to_who_streams_and_comes_to_it_as_ever(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as(local=False)
        payload_id, extent = announce(house, publisher, 0)
        assert house.ledger.take_step(reader, "r", 0) is None
        house.seal(publisher, payload_id, extent=extent)
        assert house.take(reader, 0).awaited == ()

    def test_is_told_to_a_student_that_comes_between_announcement_and_seal(
        self, house: House
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        announce(house, publisher, 0)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        (terms,) = told(house, reader)
        assert isinstance(terms, StepGrant)
        assert terms.awaited

    def test_comes_once_however_often_it_is_asked_for(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        announce(house, publisher, 0)
        assert len(told(house, reader)) == 1
        house.ledger.want_steps(reader, 0, 2)
        assert told(house, reader) == []

    def test_is_withdrawn_where_its_reservation_ends_and_may_be_announced_anew(
        self, house: House
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        payload_id, _ = announce(house, publisher, 0)
        (before,) = told(house, reader)
        assert isinstance(before, StepGrant)
        house.ledger.abandon_payload(publisher.session_id, payload_id)
        assert told(house, reader) == [StepWithdrawn(step=0)]

        again, _ = announce(house, publisher, 0)
        (after,) = told(house, reader)
        assert isinstance(after, StepGrant)
        assert after.leases[0].payload.payload_id == again
        assert after.leases[0].lease_id != before.leases[0].lease_id

    def test_is_withdrawn_with_a_publisher_that_dies(self, house: House) -> None:
        publishers = house.publishers()
        reader = house.read_as()
        house.ledger.want_steps(reader, 3, 1)
        for publisher in publishers:
            announce(house, publisher, 3)
        assert len(told(house, reader)) == 1
        house.ledger.line_ended(publishers[1].session_id, process_alive=False)
        assert told(house, reader) == [StepWithdrawn(step=3)]

    def test_is_told_when_it_is_sealed_where_it_may_retire_under_its_writer(self) -> None:
        house = House(limits=Limits(keep_steps=1))
        publishers = house.publishers()
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        places = [announce(house, publisher, 0) for publisher in publishers]
        assert told(house, reader) == []
        for publisher, (payload_id, extent) in zip(publishers, places, strict=True):
            house.seal(publisher, payload_id, extent=extent)
        (grant,) = told(house, reader)
        assert isinstance(grant, StepGrant)
        assert grant.awaited == ()

    def test_keeps_its_leases_where_a_shard_is_sealed_anew_beside_what_is_written(
        self, house: House
    ) -> None:
        first, second = house.publishers()
        early, late = house.read_as(student(dp=2, rank=0)), house.read_as(student(student_id="b"))
        house.seal(first, house.reserve(first, 0).payload_id, digest="the same")
        house.register(second, 0)
        house.take(early, 0)  # holds the first shard, whose writer goes, and so does the other's
        for publisher in (first, second):
            house.ledger.line_ended(publisher.session_id, process_alive=False)
        again, other = house.publishers()
        house.ledger.want_steps(late, 0, 1)
        payload_id, extent = announce(house, other, 0)
        (terms,) = told(house, late)
        assert isinstance(terms, StepGrant)
        house.seal(again, house.reserve(again, 0).payload_id, digest="the same")
        house.seal(other, payload_id, extent=extent)

        assert told(house, late) == []
        house.give_back(late, terms)
        assert [lease.session_id for lease in house.ledger.view().leases] == [early]

    def test_that_a_reader_gives_up_comes_to_it_when_it_is_sealed(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        payload_id, extent = announce(house, publisher, 0)
        (terms,) = told(house, reader)
        assert isinstance(terms, StepGrant)
        lease_id = terms.leases[0].lease_id
        assert house.ledger.was_announced(reader, lease_id)
        house.ledger.give_up_announced(reader, lease_id)
        assert not house.ledger.was_announced(reader, lease_id)
        house.seal(publisher, payload_id, extent=extent)

        (grant,) = told(house, reader)
        assert isinstance(grant, StepGrant)
        assert grant.awaited == ()
        assert grant.leases[0].lease_id != lease_id

    def test_that_a_reader_gave_up_is_told_to_it_no_more_however_often_it_asks(
        self, house: House
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        reader, other = house.read_as(), house.read_as(student(student_id="other"))
        house.ledger.want_steps(reader, 0, 2)
        payload_id, extent = announce(house, publisher, 0)
        (terms,) = told(house, reader)
        assert isinstance(terms, StepGrant)
        house.ledger.give_up_announced(reader, terms.leases[0].lease_id)
        house.ledger.want_steps(reader, 0, 2)
        assert told(house, reader) == []
        house.ledger.want_steps(other, 0, 1)
        assert len(told(house, other)) == 1

        announce(house, publisher, 1)
        assert [each.step for each in told(house, reader)] == [1]
        house.seal(publisher, payload_id, extent=extent)
        (grant,) = told(house, reader)
        assert isinstance(grant, StepGrant)
        assert (grant.step, grant.awaited) == (0, ())

    def test_that_is_given_up_when_it_was_withdrawn_already_comes_to_its_reader_anew(
        self, house: House
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        payload_id, _ = announce(house, publisher, 0)
        (before,) = told(house, reader)
        assert isinstance(before, StepGrant)
        house.ledger.abandon_payload(publisher.session_id, payload_id)
        house.ledger.give_up_announced(reader, before.leases[0].lease_id)
        again, extent = announce(house, publisher, 0)

        withdrawn, after = told(house, reader)
        assert withdrawn == StepWithdrawn(step=0)
        assert isinstance(after, StepGrant)
        assert after.awaited == (extent,)
        house.ledger.give_up_announced(reader, before.leases[0].lease_id)  # and once more
        house.seal(publisher, again, extent=extent)
        assert [each.lease_id for each in house.ledger.view().leases] == [
            each.lease_id for each in after.leases
        ]

    def test_keeps_a_closed_session_until_its_line_ends_since_it_may_be_read(
        self, house: House
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        payload_id, extent = announce(house, publisher, 0)
        told(house, reader)
        house.ledger.close_session(reader)
        house.seal(publisher, payload_id, extent=extent)
        assert house.ledger.lease_count() == 1
        house.ledger.line_ended(reader, process_alive=True)
        assert house.ledger.lease_count() == 0

    def test_holds_nothing_for_a_session_that_ended(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        payload_id, extent = announce(house, publisher, 0)
        told(house, reader)
        house.ledger.line_ended(reader, process_alive=False)
        assert house.ledger.view().sessions[0].kind == "publisher"
        house.seal(publisher, payload_id, extent=extent)
        assert house.ledger.lease_count() == 0

    def test_is_taken_back_by_force_from_a_reader_that_may_have_read_it(self, house: House) -> None:
        class Page:
            def __init__(self) -> None:
                self.revoked: list[str] = []

            def revoke(self, lease_id: str) -> None:
                self.revoked.append(lease_id)

        page = Page()
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        session = house.ledger._sessions.find(reader)
        assert session is not None
        assert session.line is not None
        session.line = session.last_line = replace(session.line, page=page)
        house.ledger.want_steps(reader, 0, 1)
        announce(house, publisher, 0)
        (terms,) = told(house, reader)
        assert isinstance(terms, StepGrant)
        house.ledger.reclaim_session(reader)
        assert page.revoked == [terms.leases[0].lease_id]

    def test_is_sealed_as_it_was_announced_and_not_otherwise(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        payload_id, _ = announce(house, publisher, 0)
        with pytest.raises(PayloadInvalidError, match="was announced at"):
            house.seal(publisher, payload_id, extent=house.extent(publisher))

    def test_with_a_count_that_cannot_be_has_ended(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        payload_id = house.reserve(publisher, 0).payload_id
        with pytest.raises(PayloadInvalidError, match="valid_count"):
            house.ledger.announce_payload(
                publisher.session_id,
                payload_id,
                extent=house.extent(publisher),
                valid_count=1 << 40,
            )
        with pytest.raises(ReservationLapsedError):
            house.seal(publisher, payload_id)

    def test_of_a_repeat_is_told_to_nobody(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        house.register(publisher, 0)
        repeat = house.reserve(publisher, 0)
        assert repeat.is_repeat
        house.ledger.announce_payload(
            publisher.session_id,
            repeat.payload_id,
            extent=house.extent(publisher),
            valid_count=None,
        )
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        (grant,) = told(house, reader)
        assert isinstance(grant, StepGrant)
        assert grant.awaited == ()

    def test_is_nothing_that_its_publisher_is_told_to_be_free(self, house: House) -> None:
        publisher = house.publish_as(teacher(dp=1))
        payload_id, _ = announce(house, publisher, 0)
        house.ledger.abandon_payload(publisher.session_id, payload_id)
        assert not any(
            isinstance(each, RoomFreed) and each.payload_ids
            for each in house.ledger.take_mail(publisher.session_id)
        )
        assert house.used() == (0, 0)


class TestWhatLiesOnADevice:
    def test_is_announced_to_nobody_since_its_seal_may_be_refused_behind_its_slot(self) -> None:
        house = DeviceHouse()
        publisher = house.publish_on_device()
        opens_it = house.read_on_device()
        reads_copies = house.read_as(wishing(student_id="copies"))
        for reader in (opens_it, reads_copies):
            house.ledger.want_steps(reader, 0, 1)
        payload_id, extent = announce(house, publisher, 0)
        assert told(house, opens_it) == told(house, reads_copies) == []
        assert house.ledger.announced(publisher.session_id) == []

        def seal(*, host_copy: bool) -> None:
            house.ledger.seal_payload(
                publisher.session_id,
                payload_id,
                extent=extent,
                bad_row_count=0,
                valid_count=None,
                host_copy=host_copy,
            )

        with pytest.raises(HostCopyNeededError):
            seal(host_copy=False)
        assert told(house, opens_it) == told(house, reads_copies) == []
        seal(host_copy=True)
        for reader, on_device in ((opens_it, True), (reads_copies, False)):
            (grant,) = told(house, reader)
            assert isinstance(grant, StepGrant)
            assert grant.awaited == ()
            assert [lease.on_device for lease in grant.leases] == [on_device]

    def test_keeps_the_shards_beside_it_from_being_announced(self) -> None:
        house = DeviceHouse()
        on_device = house.publish_on_device(teacher(dp=2, shard=0))
        on_host = house.publish_as(teacher(dp=2, shard=1))
        reader = house.read_on_device()
        house.ledger.want_steps(reader, 0, 1)
        payload_id, extent = announce(house, on_host, 0)
        house.register_on_device(on_device, 0)
        assert told(house, reader) == []

        house.seal(on_host, payload_id, extent=extent)
        (grant,) = told(house, reader)
        assert isinstance(grant, StepGrant)
        assert grant.awaited == ()
        assert [lease.on_device for lease in grant.leases] == [True, False]
