"""What is left over by those who died or left: orphans, deserted teachers, held lines."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.server.ledger.registering import PAGE, House, Limits, Publisher, student, teacher

from teacher_logits.errors import (
    NotAllowedError,
    PayloadConflictError,
    PayloadRetiredError,
    ProducerLostError,
    ReservationLapsedError,
    SessionExpiredError,
    UnknownTeacherError,
)
from teacher_logits.terms import StepGrant


@pytest.fixture
def house() -> House:
    return House()


def die(house: House, publisher: Publisher) -> None:
    house.ledger.line_ended(publisher.session_id, process_alive=False)


def stages(house: House) -> list[str]:
    return [step.stage for step in house.ledger.view().steps]


class TestAnOrphan:
    """A payload of a publisher that died while somebody had leased it."""

    @pytest.mark.parametrize("back_to_front", [False, True])
    def test_that_everybody_has_read_is_retired_with_its_step(
        self, house: House, back_to_front: bool
    ) -> None:
        first, second = house.publishers()
        reader = house.read_as()
        for publisher in (first, second):
            house.register(publisher, 0)
        leases = house.take(reader, 0).leases
        die(house, first)

        for lease in reversed(leases) if back_to_front else leases:
            house.ledger.release(reader, lease.lease_id)

        assert stages(house) == []
        assert len(house.hear(second)) == 1
        assert house.registered() == (0, 0)

    def test_is_read_in_the_end_by_ranks_of_which_each_had_only_a_part(self, house: House) -> None:
        first, second = house.publishers()
        readers = [house.read_as(student(dp=2, rank=rank)) for rank in range(2)]
        for publisher in (first, second):
            house.register(publisher, 0)
        grants = [house.take(reader, 0) for reader in readers]
        die(house, first)

        house.give_back(readers[0], grants[0])
        assert stages(house) == ["lost"]
        house.give_back(readers[1], grants[1])

        assert stages(house) == []

    def test_that_one_student_never_had_is_lost_to_it_until_that_leaves(self, house: House) -> None:
        first, second = house.publishers()
        reader, late = (house.read_as(student(student_id=name)) for name in "ab")
        for publisher in (first, second):
            house.register(publisher, 0)
        grant = house.take(reader, 0)
        die(house, first)
        house.give_back(reader, grant)

        with pytest.raises(ProducerLostError):
            house.take(late, 0)
        house.ledger.line_ended(late, process_alive=False)

        assert stages(house) == []

    def test_gives_its_place_to_an_equal_repeat(self, house: House) -> None:
        first, second = house.publishers()
        reader, late = (house.read_as(student(student_id=name)) for name in "ab")
        payload_id = house.reserve(first, 0).payload_id
        house.seal(first, payload_id, digest="d")
        house.register(second, 0)
        grant = house.take(reader, 0)
        die(house, first)
        again = house.publish_as(first.profile)
        reserved = house.reserve(again, 0)
        assert reserved.is_repeat

        house.seal(again, reserved.payload_id, digest="d")

        assert house.dropped == []  # the orphan's slab: it is read yet
        assert house.hear(again) == ()
        house.give_back(reader, grant)
        assert house.dropped == [first.slab_id]
        late_grant = house.take(late, 0)
        assert late_grant.leases[0].payload.payload_id == reserved.payload_id
        house.give_back(late, late_grant)
        assert stages(house) == []
        assert house.hear(again) == (reserved.payload_id,)

    def test_gives_no_place_to_other_bytes(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        payload_id = house.reserve(publisher, 0).payload_id
        house.seal(publisher, payload_id, digest="d")
        house.take(reader, 0)
        die(house, publisher)
        again = house.publish_as(publisher.profile)
        reserved = house.reserve(again, 0)

        with pytest.raises(PayloadConflictError, match="sealed before with digest d"):
            house.seal(again, reserved.payload_id, digest="e")

    def test_gives_its_place_to_streamed_bytes_too(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1, local=False)
        reader, late = (house.read_as(student(student_id=name)) for name in "ab")
        first = house.reserve(publisher, 0).payload_id
        house.take_room(publisher, first)
        house.write(publisher, first)
        house.seal(publisher, first, digest="d")
        grant = house.take(reader, 0)
        house.ledger.reclaim_session(publisher.session_id)
        again = house.publish_as(publisher.profile, local=False)
        second = house.reserve(again, 0).payload_id
        house.take_room(again, second)
        house.write(again, second)

        house.seal(again, second, digest="d")

        assert house.used() == (2, 0)
        house.give_back(reader, grant)
        assert house.used() == (1, 0)
        house.give_back(late, house.take(late, 0))
        assert house.used() == (0, 0)

    def test_that_comes_back_before_its_repeat_is_sealed_leaves_the_place_free(
        self, house: House
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        reader, late = (house.read_as(student(student_id=name)) for name in "ab")
        house.register(publisher, 0)
        grant = house.take(reader, 0)
        die(house, publisher)
        again = house.publish_as(publisher.profile)
        reserved = house.reserve(again, 0).payload_id
        house.give_back(reader, grant)

        house.seal(again, reserved, digest="whatever")

        house.give_back(late, house.take(late, 0))
        assert stages(house) == []

    def test_that_all_have_read_ends_its_repeat(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        grant = house.take(reader, 0)
        die(house, publisher)
        again = house.publish_as(publisher.profile)
        reserved = house.reserve(again, 0).payload_id

        house.give_back(reader, grant)

        with pytest.raises(ReservationLapsedError):
            house.seal(again, reserved, digest="d")
        with pytest.raises(PayloadRetiredError):
            house.reserve(again, 0)

    def test_a_step_that_nobody_has_read_and_nobody_waits_for_is_not_kept_lost(
        self, house: House
    ) -> None:
        first, second = house.publishers()
        early = house.read_as(student(student_id="a"))
        for step in range(2):
            for publisher in (first, second):
                house.register(publisher, step)
        house.give_back(early, house.take(early, 1))
        house.read_as(student(student_id="b"))  # begins behind step 1
        house.ledger.line_ended(early, process_alive=False)
        house.register(first, 2)
        die(house, first)

        assert stages(house) == ["lost"]
        assert [step.step for step in house.ledger.view().steps] == [2]


class TestALostStep:
    def test_is_over_once_all_have_gone_on_without_it(self, house: House) -> None:
        first, second = house.publishers()
        readers = [house.read_as(student(dp=2, rank=rank)) for rank in range(2)]
        house.register(first, 0)
        house.register(second, 0)
        die(house, first)
        again = house.publish_as(first.profile)
        for publisher in (again, second):
            house.register(publisher, 1)
        grants = [house.take(reader, 1) for reader in readers]

        house.give_back(readers[0], grants[0])
        with pytest.raises(ProducerLostError):
            house.take(readers[1], 0)
        assert stages(house) == ["lost", "complete"]
        house.give_back(readers[1], grants[1])

        assert stages(house) == []
        assert len(house.hear(second)) == 2
        assert house.reserve(again, 2).lowest_open_step == 3  # what comes next, and not step 0

    def test_that_is_written_again_waits_for_all_who_did_not_go_on(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        die(house, publisher)
        again = house.publish_as(publisher.profile)
        house.register(again, 0)
        house.register(again, 1)

        house.give_back(reader, house.take(reader, 1))

        assert stages(house) == ["complete"]
        assert house.take(reader, 0).leases


class TestTheEndOfAClosedSessionsLine:
    def test_frees_what_was_sent_ahead_unread(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        stays, goes = (house.read_as(student(student_id=name)) for name in "ab")
        house.register(publisher, 0)
        house.ledger.want_steps(goes, 0, 1)
        (grant,) = house.mail(goes)
        assert isinstance(grant, StepGrant)
        house.ledger.close_session(goes)

        assert not house.ledger.line_ended(goes, process_alive=True)

        view = house.ledger.view()
        assert view.leases == ()
        assert [step.waits_for for step in view.steps] == [("a:0",)]
        house.give_back(stays, house.take(stays, 0))
        assert house.registered() == (0, 0)

    def test_is_in_doubt_where_it_was_the_server_that_hung_up(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        house.take(reader, 0)
        house.ledger.close_session(reader)

        assert house.ledger.line_ended(reader, process_alive=True, is_cut=True)

        assert [lease.doubt for lease in house.ledger.view().leases] == ["line_ended"]


class TestADesertedTeacher:
    def left(self, house: House, *, read: bool = True) -> Publisher:
        (publisher,) = house.publishers(dp=1)
        for step in range(2):
            house.register(publisher, step)
        if read:
            reader = house.read_as()
            house.give_back(reader, house.take(reader, 0))
            house.ledger.close_session(reader)
            house.ledger.line_ended(reader, process_alive=True)
        house.ledger.close_session(publisher.session_id)
        house.ledger.line_ended(publisher.session_id, process_alive=True)
        return publisher

    def test_is_kept_for_a_while_and_then_gone(self, house: House) -> None:
        publisher = self.left(house)
        assert stages(house) == ["deserted"]

        house.clock.advance(59)
        house.ledger.sweep()
        assert house.registered() == (PAGE, 0)
        house.clock.advance(1)
        house.ledger.sweep()

        assert house.registered() == (0, 0)
        assert house.dropped == [publisher.slab_id]
        assert house.ledger.teachers() == ()

    def test_has_its_time_counted_from_the_last_who_left(self, house: House) -> None:
        self.left(house)
        house.clock.advance(59)
        again = house.read_as()
        house.clock.advance(30)
        house.ledger.sweep()
        house.ledger.line_ended(again, process_alive=False)

        house.clock.advance(59)
        house.ledger.sweep()
        assert stages(house) == ["deserted"]
        house.clock.advance(1)
        house.ledger.sweep()
        assert stages(house) == []

    def test_is_left_by_students_whose_time_has_passed_too(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        house.read_as(local=False)
        house.register(publisher, 0)
        house.ledger.close_session(publisher.session_id)

        house.clock.advance(30)
        house.ledger.sweep()
        house.clock.advance(60)
        house.ledger.sweep()

        assert house.registered() == (0, 0)

    def test_that_no_student_has_come_for_yet_is_kept(self, house: House) -> None:
        self.left(house, read=False)
        house.clock.advance(10_000)
        house.ledger.sweep()

        assert stages(house) == ["complete", "complete"]
        assert house.take(house.read_as(), 0).leases

    def test_can_be_reclaimed_whether_it_was_read_or_not(self, house: House) -> None:
        for read, pages in ((True, 1), (False, 2)):
            self.left(house, read=read)

            assert house.ledger.reclaim_teacher("teacher").freed_bytes == pages * PAGE

            assert house.ledger.teachers() == ()

    def test_is_reclaimed_only_where_nobody_is_there(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        with pytest.raises(NotAllowedError, match="has publishers or students"):
            house.ledger.reclaim_teacher("teacher")
        house.register(publisher, 0)
        house.read_as()
        house.ledger.close_session(publisher.session_id)
        with pytest.raises(NotAllowedError):
            house.ledger.reclaim_teacher("teacher")
        with pytest.raises(UnknownTeacherError):
            house.ledger.reclaim_teacher("nobody")

    def test_may_be_gone_at_once(self) -> None:
        house = House(limits=Limits(keep_deserted=timedelta(0)))
        self.left(house)

        house.ledger.sweep()

        assert stages(house) == []


class TestAProcessThatDiedWhileAChildHoldsItsLine:
    def test_leaves_its_seat_and_keeps_its_room(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        stays, dies = (house.read_as(student(student_id=name)) for name in "ab")
        first = house.register(publisher, 0)
        house.take(dies, 0)
        house.give_back(stays, house.take(stays, 0))

        assert house.ledger.process_died(dies)

        second = house.register(publisher, 1)
        house.give_back(stays, house.take(stays, 1))
        assert house.hear(publisher) == (second,)
        states = {each.student_id: each.state for each in house.ledger.view().sessions}
        assert states == {"": "alive", "a": "alive", "b": "died"}
        house.ledger.line_ended(dies, process_alive=False)
        assert house.hear(publisher) == (first,)

    def test_gets_nothing_new(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        house.ledger.want_steps(reader, 0, 2)
        house.mail(reader)
        house.ledger.process_died(reader)
        house.register(publisher, 1)

        assert house.mail(reader) == []
        with pytest.raises(SessionExpiredError):
            house.take(reader, 1)

    def test_cannot_be_closed_under_its_child(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        house.take(reader, 0)
        house.ledger.process_died(reader)

        house.ledger.close_session(reader)

        assert len(house.ledger.view().leases) == 1
        assert house.ledger.reclaim_session(reader).lease_count == 1

    def test_is_gone_where_it_has_leased_nothing(self, house: House) -> None:
        house.publishers(dp=1)
        reader = house.read_as()

        assert not house.ledger.process_died(reader)

        assert [each.kind for each in house.ledger.view().sessions] == ["publisher"]
        assert not house.ledger.line_ended(reader, process_alive=False)

    def test_leaves_the_seat_that_its_closed_session_kept(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        stays, dies = (house.read_as(student(student_id=name)) for name in "ab")
        house.register(publisher, 0)
        house.take(dies, 0)
        house.ledger.close_session(dies)

        assert house.ledger.process_died(dies)

        house.register(publisher, 1)
        house.give_back(stays, house.take(stays, 1))
        assert len(house.hear(publisher)) == 1

    def test_publishes_no_more(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        house.reserve(publisher, 0)

        assert not house.ledger.process_died(publisher.session_id)

        with pytest.raises(SessionExpiredError):
            house.reserve(publisher, 1)
        house.register(house.publish_as(publisher.profile), 0)

    def test_is_nothing_to_a_session_that_streams(self, house: House) -> None:
        house.publishers(dp=1)
        reader = house.read_as(student(transports=("stream", "shared_memory")))

        assert not house.ledger.process_died(reader)

        house.ledger.renew(reader)


class TestTheSlabOfAPublisherThatIsGone:
    """Nobody writes there again: what is read in it stays as it is, and is in no quarantine."""

    def two(self, house: House) -> tuple[Publisher, str, str]:
        (publisher,) = house.publishers(dp=1)
        stays, goes = (house.read_as(student(student_id=name)) for name in "ab")
        house.register(publisher, 0)
        house.take(goes, 0)
        house.give_back(stays, house.take(stays, 0))
        return publisher, stays, goes

    def test_keeps_nothing_in_doubt_of_readers_that_go_later(self, house: House) -> None:
        publisher, _, goes = self.two(house)
        die(house, publisher)

        assert not house.ledger.line_ended(goes, process_alive=True)

        assert house.registered() == (0, 0)
        assert house.dropped == [publisher.slab_id]

    def test_keeps_nothing_in_doubt_of_readers_that_went_before(self, house: House) -> None:
        publisher, _, goes = self.two(house)
        house.ledger.line_ended(goes, process_alive=True)
        assert house.registered() == (0, PAGE)

        die(house, publisher)

        view = house.ledger.view()
        assert (view.leases, house.registered()) == ((), (0, 0))
        assert goes not in {each.session_id for each in view.sessions}
        assert house.dropped == [publisher.slab_id]

    def test_counts_no_more_once_its_last_lease_is_reclaimed(self, house: House) -> None:
        publisher, _, goes = self.two(house)
        die(house, publisher)

        reclaimed = house.ledger.reclaim_session(goes)

        assert reclaimed.freed_bytes == PAGE
        assert house.dropped == [publisher.slab_id]
        assert house.ledger.view().registered.slab_count == 0


def test_a_teacher_of_another_kind_takes_the_place_of_a_deserted_one(house: House) -> None:
    (publisher,) = house.publishers(dp=1)
    house.register(publisher, 0)
    house.ledger.close_session(publisher.session_id)

    house.publish_as(teacher(dp=1, top_k=3))

    assert stages(house) == []
    assert house.registered() == (0, 0)


class TestAClosedSessionWithALeaseOut:
    """A forked worker, or a view that a graph keeps, may hold it for long."""

    def test_lets_other_steps_go_on_without_it(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        stays, closes = (house.read_as(student(student_id=name)) for name in "ab")
        first, second = (house.register(publisher, step) for step in range(2))
        grant = house.take(closes, 0)
        house.give_back(stays, house.take(stays, 0))
        house.give_back(stays, house.take(stays, 1))
        assert house.hear(publisher) == ()

        house.ledger.close_session(closes)

        assert house.hear(publisher) == (second,)
        third = house.register(publisher, 2)
        house.give_back(stays, house.take(stays, 2))
        assert house.hear(publisher) == (third,)
        house.give_back(closes, grant)
        assert house.hear(publisher) == (first,)

    def test_retires_nothing_where_it_was_the_last(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        first = house.register(publisher, 0)
        house.register(publisher, 1)
        grant = house.take(reader, 0)

        house.ledger.close_session(reader)

        assert stages(house) == ["complete", "complete"]
        house.give_back(reader, grant)
        assert house.hear(publisher) == (first,)
        assert house.take(house.read_as(), 1).leases

    def test_leaves_its_students_other_ranks_their_steps(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        ranks = [house.read_as(student(dp=2, rank=rank)) for rank in range(2)]
        for step in range(2):
            house.register(publisher, step)
        house.take(ranks[0], 0)

        house.ledger.close_session(ranks[0])

        house.give_back(ranks[1], house.take(ranks[1], 1))
        assert [step.waits_for for step in house.ledger.view().steps] == [
            ("student:0", "student:1"),
            ("student:0",),
        ]
