"""Registered payloads through the ledger: from the publisher's claim to its room's return."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.server.ledger.registering import (
    CHALLENGE,
    PAGE,
    House,
    Limits,
    Publisher,
    insisting,
    old_id,
    student,
    teacher,
)

from teacher_logits.errors import (
    DrainingError,
    EpochChangedError,
    NotAllowedError,
    PayloadConflictError,
    PayloadInvalidError,
    PayloadRetiredError,
    PoolFullError,
    ProducerLostError,
    RequestInvalidError,
    ReservationLapsedError,
    SessionRefusedError,
)
from teacher_logits.keys import PayloadKey
from teacher_logits.profiles import PROTOCOL_VERSION, NodeHints
from teacher_logits.terms import SERVER_WRITER, RoomFreed, StepFailure, StepGrant
from teacher_logits.transport import Transport
from teacher_logits_server.admission.holders import PlaceTaken
from teacher_logits_server.publishers import TeacherAbsent, TeacherIncomplete
from teacher_logits_server.publishers.engines import EngineTeacher
from teacher_logits_server.steps.mail import MAX_WANTED_STEPS


@pytest.fixture
def house() -> House:
    return House()


def rows_of(grant: StepGrant) -> list[tuple[int, int]]:
    return [(lease.payload.first_row, lease.payload.row_count) for lease in grant.leases]


class TestComingIn:
    def test_a_student_waits_for_a_teacher_that_has_not_come(self, house: House) -> None:
        with pytest.raises(TeacherAbsent, match="no teacher 'teacher' here; there are: none"):
            house.open(student(teacher_id="teacher"))

    def test_a_student_waits_for_all_of_its_publishers(self, house: House) -> None:
        house.publish_as(teacher(dp=3, shard=1))

        with pytest.raises(TeacherIncomplete, match="2 of them have not come: shard 0, 2"):
            house.open()

    def test_a_publisher_that_is_not_settled_is_not_there(self, house: House) -> None:
        house.ledger.open_publisher(request_id="r", protocol_version=1, profile=teacher(dp=1))

        with pytest.raises(TeacherIncomplete):
            house.open()

    def test_waiters_are_told_when_a_publisher_is_there(self, house: House) -> None:
        told: list[str] = []
        house.ledger.on_teachers_changed(lambda: told.append("changed"))

        house.publish_as(teacher(dp=1))

        assert told
        assert house.open().terms.teacher.teacher_id == "teacher"

    def test_a_publisher_is_granted_what_it_said(self, house: House) -> None:
        publisher = house.publish_as(teacher(shard=1))

        terms = house.ledger.terms(publisher.session_id)

        assert terms.teacher == publisher.profile
        assert terms.settlements[0].transport is Transport.SHARED_MEMORY
        assert publisher.writer_id.startswith("publisher-1-")

    def test_a_publisher_elsewhere_streams_into_the_servers_slabs(self, house: House) -> None:
        publisher = house.publish_as(local=False)

        assert publisher.writer_id == SERVER_WRITER

    def test_a_retry_gets_the_same_session(self, house: House) -> None:
        first, second = (
            house.ledger.open_publisher(request_id="r", protocol_version=1, profile=teacher())
            for _ in range(2)
        )

        assert first == second

    def test_a_student_reads_the_engine_and_others_read_publishers(self) -> None:
        engine = replace(teacher(), teacher_id="engine", batch_grid=None)
        house = House(engines=(EngineTeacher(profile=engine),))
        house.publishers()

        scored = house.read_as(student(teacher_id="engine"))
        read = house.read_as(student(teacher_id="teacher"))

        house.ledger.note_request(scored, "r", b"")
        with pytest.raises(NotAllowedError, match="scores nothing"):
            house.ledger.note_request(read, "r", b"")
        with pytest.raises(NotAllowedError, match="has no steps"):
            house.ledger.take_step(scored, "r", 0)
        assert [each.teacher_id for each in house.ledger.teachers()] == ["engine", "teacher"]

    def test_ids_that_the_teacher_has_not_masked_refuse_a_smaller_student(
        self, house: House
    ) -> None:
        house.publishers()

        with pytest.raises(SessionRefusedError, match=r"publishers must mask the ids from 90 on"):
            house.open(student(vocabulary_size=90, vocabulary_policy="truncate"))

    def test_one_student_has_one_grid(self, house: House) -> None:
        house.publishers()
        house.read_as(student(dp=2))

        with pytest.raises(SessionRefusedError, match="student_grid_conflict"):
            house.open(student(dp=1))

    def test_a_rank_that_is_read_takes_no_other_reader(self, house: House) -> None:
        house.publishers()
        hints = NodeHints(host_name="node", pid=77)
        house.read_as(student(dp=2, hints=hints))

        with pytest.raises(SessionRefusedError) as refusal:
            house.open(student(dp=2))
        (violation,) = refusal.value.violations
        assert violation.rule == "rank_taken"
        assert violation.facts["data_parallel_rank"] == 0
        assert (violation.facts["pid"], violation.facts["host_name"]) == (7, "node")
        for way_out in ("data_parallel_rank=", "readers_per_rank=", "student_id="):
            assert way_out in violation.message
        house.open(student(dp=2, rank=1))
        house.open(student(dp=2, student_id="another"))

    def test_a_rank_has_as_many_readers_as_its_student_said(self, house: House) -> None:
        house.publishers()
        profile = student(readers_per_rank=2)
        house.read_as(profile)
        house.read_as(profile)

        with pytest.raises(SessionRefusedError, match="and 1 more"):
            house.open(profile)

    @pytest.mark.parametrize("how", ["closed", "dead", "child", "cut", "ttl", "never settled"])
    def test_a_reader_that_is_gone_gives_its_seat_up(self, house: House, how: str) -> None:
        publishers = house.publishers()
        if how == "never settled":
            house.open()
            house.clock.advance(10)
        else:
            session_id = house.read_as(local=how != "ttl")
            for publisher in publishers:
                house.register(publisher, 0)
            house.take(session_id, 0)
            if how == "closed":
                house.ledger.close_session(session_id)
            elif how == "child":
                house.ledger.process_died(session_id)
            elif how == "ttl":
                house.clock.advance(30)  # and nobody has swept
            else:
                house.ledger.line_ended(session_id, process_alive=how == "cut")

        house.read_as()

    def test_a_seat_that_only_time_frees_says_how_long(self, house: House) -> None:
        house.publishers()
        house.read_as(local=False)
        house.clock.advance(12)

        with pytest.raises(SessionRefusedError, match="free within 18 s") as refusal:
            house.open()
        assert refusal.value.facts["free_within_seconds"] == 18

    def test_a_process_that_reads_a_rank_itself_is_told_so(self, house: House) -> None:
        house.publishers()
        profile = student(hints=NodeHints(host_name="node", pid=77))
        house.read_as(profile, local=False)

        with pytest.raises(SessionRefusedError, match="read by this very process"):
            house.open(profile)

    def test_who_dies_before_it_has_settled_leaves_its_seat_at_once(self, house: House) -> None:
        house.publishers()
        opened = house.open()
        session_id = opened.terms.session_id
        house.ledger.check_hello(session_id, opened.nonce)
        house.ledger.line_opened(session_id, pid=7, challenge=CHALLENGE)

        house.ledger.line_ended(session_id, process_alive=False)

        house.read_as()

    def test_who_waits_for_a_seat_is_told_of_its_readers_life_and_end(self, house: House) -> None:
        house.publishers()
        rings: list[str] = []
        session_id = house.read_as(local=False)
        house.ledger.on_teachers_changed(lambda: rings.append("ring"))
        house.ledger.renew(session_id)
        assert not rings
        for end in (house.ledger.renew, house.ledger.close_session):
            with pytest.raises(SessionRefusedError, match="rank_taken"):
                house.open()
            rings.clear()

            end(session_id)

            assert rings

    def test_a_shard_is_published_by_one(self, house: House) -> None:
        house.publish_as(teacher(shard=1))

        with pytest.raises(SessionRefusedError) as refusal:
            house.publish_as(teacher(shard=1, hints=NodeHints(host_name="other", pid=1001)))
        (violation,) = refusal.value.violations
        assert violation.rule == "shard_taken"
        assert violation.facts == {"shard": 1, "pid": 7, "host_name": "node"}
        assert "published by process 7 on node" in violation.message
        house.publish_as(teacher(shard=0))

    def test_a_publisher_that_breaks_other_rules_too_is_told_of_all(self, house: House) -> None:
        house.publish_as(teacher())

        with pytest.raises(SessionRefusedError) as refusal:
            house.publish_as(teacher(top_k=8))
        assert not isinstance(refusal.value, PlaceTaken)  # no wait would help
        rules = [violation.rule for violation in refusal.value.violations]
        assert rules == ["teacher_grid_conflict", "shard_taken"]

    @pytest.mark.parametrize("how", ["closed", "dead", "child", "cut", "ttl", "never settled"])
    def test_a_publisher_that_is_gone_gives_its_shard_up(self, house: House, how: str) -> None:
        if how == "never settled":
            house.ledger.open_publisher(
                request_id="r", protocol_version=PROTOCOL_VERSION, profile=teacher()
            )
            house.clock.advance(10)
        else:
            session_id = house.publish_as(teacher(), local=how != "ttl").session_id
            if how == "closed":
                house.ledger.close_session(session_id)
            elif how == "child":
                house.ledger.process_died(session_id)
            elif how == "ttl":
                house.clock.advance(30)  # and nobody has swept
            else:
                house.ledger.line_ended(session_id, process_alive=how == "cut")

        house.publish_as(teacher())

    def test_a_shard_that_only_time_frees_says_how_long(self, house: House) -> None:
        house.publish_as(teacher(), local=False)
        house.clock.advance(12)

        with pytest.raises(SessionRefusedError, match="free within 18 s") as refusal:
            house.publish_as(teacher())
        assert refusal.value.facts["free_within_seconds"] == 18

    def test_who_waits_for_a_shard_is_told_of_its_publishers_life_and_end(
        self, house: House
    ) -> None:
        rings: list[str] = []
        session_id = house.publish_as(teacher(), local=False).session_id
        house.ledger.on_teachers_changed(lambda: rings.append("ring"))
        house.ledger.renew(session_id)
        assert not rings
        for end in (house.ledger.renew, house.ledger.close_session):
            with pytest.raises(SessionRefusedError, match="shard_taken"):
                house.publish_as(teacher())
            rings.clear()

            end(session_id)

            assert rings

    def test_a_session_that_was_found_over_is_told_with_the_next_pass(self, house: House) -> None:
        session_id = house.publish_as(teacher(), local=False).session_id
        house.clock.advance(30)
        house.publish_as(teacher(), local=False)

        assert house.ledger.sweep() == [session_id]
        assert house.ledger.sweep() == []

    def test_a_publisher_may_not_read_nor_a_student_write(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()

        with pytest.raises(NotAllowedError, match="publisher's session"):
            house.ledger.take_step(publisher.session_id, "r", 0)
        with pytest.raises(NotAllowedError, match="publisher's session"):
            house.ledger.may_open(publisher.session_id, publisher.slab_id)
        with pytest.raises(NotAllowedError, match="student's session"):
            house.ledger.abandon_payload(reader, "p")

    def test_a_server_that_drains_takes_neither(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        house.ledger.drain()

        with pytest.raises(DrainingError):
            house.publish_as(teacher(teacher_id="other"))
        with pytest.raises(DrainingError):
            house.open()
        with pytest.raises(DrainingError):
            house.reserve(publisher, 0)


class TestSettlement:
    def test_a_rank_is_told_of_the_writers_whose_rows_it_reads(self, house: House) -> None:
        first, second = house.publishers()

        reader = house.read_as(student(dp=2, rank=1))

        settlements = house.ledger.terms(reader).settlements
        assert [each.writer_id for each in settlements] == [second.writer_id]
        assert settlements[0].transport is Transport.SHARED_MEMORY
        assert first.writer_id != second.writer_id

    def test_local_is_for_the_servers_own_slabs(self, house: House) -> None:
        house.publishers(dp=1)

        (settlement,) = house.ledger.terms(house.read_as()).settlements

        assert settlement.refusals[0].transport is Transport.LOCAL

    def test_a_reader_elsewhere_streams(self, house: House) -> None:
        house.publishers(dp=1)

        (settlement,) = house.ledger.terms(house.read_as(local=False)).settlements

        assert settlement.transport is Transport.STREAM

    def test_a_writer_that_comes_later_is_settled_with_the_step(self, house: House) -> None:
        first, second = house.publishers()
        reader = house.read_as()
        house.ledger.close_session(second.session_id)
        house.ledger.line_ended(second.session_id, process_alive=False)
        third = house.publish_as(second.profile)
        for publisher in (first, third):
            house.register(publisher, 0)
            house.register(publisher, 1)

        grants = [house.take(reader, step) for step in (0, 1)]

        assert [[each.writer_id for each in grant.settlements] for grant in grants] == [
            [third.writer_id],
            [],
        ]

    def test_who_insists_is_refused_at_the_step_of_a_writer_it_shares_nothing_with(
        self, house: House
    ) -> None:
        (remote,) = house.publishers(dp=1, local=False)
        reader = house.in_process(insisting(student()))
        house.ledger.close_session(remote.session_id)
        house.register(house.publish_as(remote.profile), 0)

        with pytest.raises(SessionRefusedError, match="not_proven_local"):
            house.ledger.take_step(reader, "r", 0)

        assert house.ledger.lease_count() == 0
        house.ledger.renew(reader)

    def test_a_line_that_ended_proves_nothing_to_later_writers(self, house: House) -> None:
        (remote,) = house.publishers(dp=1, local=False)
        reader = house.read_as(student(transports=("stream", "shared_memory")))
        house.ledger.line_ended(reader, process_alive=True)
        house.ledger.close_session(remote.session_id)

        house.register(house.publish_as(remote.profile), 0)

        (lease,) = house.take(reader, 0).leases
        assert lease.extent is None


class TestReserving:
    def test_a_retry_gets_the_same_reservation(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)

        first = house.reserve(publisher, 0, request_id="r")

        assert house.reserve(publisher, 0, request_id="r") == first

    def test_rows_of_another_shard_are_refused(self, house: House) -> None:
        first, second = house.publishers()
        house.reserve(first, 0)

        with pytest.raises(PayloadConflictError):
            house.reserve(second, 0, rows=range(5, 12))

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"top_k": 3}, r"top_k 3.*says 4"),
            ({"vocabulary_size": 99}, r"vocabulary_size 99.*says 100"),
            ({"key": PayloadKey(teacher_id="teacher", step=0, shard=1)}, r"shard 1.*says 0"),
            ({"key": PayloadKey(teacher_id="other", step=0, shard=0)}, "teacher_id other"),
            ({"key": PayloadKey(teacher_id="teacher", step=-1, shard=0)}, "a step from 0 on"),
            ({"key": None}, "is named by"),
        ],
    )
    def test_what_the_profile_did_not_say_is_refused(
        self, house: House, changes: dict[str, object], says: str
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        payload = house.payload(publisher, 0, publisher.rows)
        if "top_k" in changes:
            payload = house.payload(
                replace(publisher, profile=replace(publisher.profile, top_k=3)),
                0,
                publisher.rows,
            )

        with pytest.raises(PayloadInvalidError, match=says):
            house.ledger.reserve_payload(
                publisher.session_id,
                "r",
                replace(payload, **changes),  # type: ignore[arg-type]
                (2,) * 12,
                0,
            )

    def test_positions_must_be_those_of_the_rows(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        payload = house.payload(publisher, 0, publisher.rows)

        for positions, says in (((2,) * 11, "11 rows"), ((2,) * 11 + (3,), "25 positions.*24")):
            with pytest.raises(PayloadInvalidError, match=says):
                house.ledger.reserve_payload(publisher.session_id, "r", payload, positions, 0)

    def test_rows_that_are_padding_are_refused(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)

        with pytest.raises(PayloadInvalidError, match="9 real rows"):
            house.reserve(publisher, 0, real_rows=9)
        with pytest.raises(PayloadInvalidError, match="13 of them cannot be real"):
            house.reserve(publisher, 0, real_rows=13)

    def test_an_ended_reservation_says_so(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        payload_id = house.reserve(publisher, 0).payload_id

        house.ledger.abandon_payload(publisher.session_id, payload_id)
        house.ledger.abandon_payload(publisher.session_id, payload_id)

        with pytest.raises(ReservationLapsedError):
            house.seal(publisher, payload_id)
        assert not house.reserve(publisher, 0).is_repeat

    def test_another_publishers_reservation_is_not_touched(self, house: House) -> None:
        first, second = house.publishers()
        payload_id = house.reserve(first, 0).payload_id

        with pytest.raises(NotAllowedError, match="another session"):
            house.ledger.abandon_payload(second.session_id, payload_id)
        with pytest.raises(NotAllowedError, match="another session"):
            house.seal(second, payload_id)

        house.seal(first, payload_id)


class TestSealing:
    def test_twice_is_fine(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        payload_id = house.reserve(publisher, 0).payload_id
        extent = house.extent(publisher)
        house.seal(publisher, payload_id, extent=extent)

        house.seal(publisher, payload_id, extent=extent)

        assert house.registered() == (PAGE, 0)

    def test_needs_an_extent_of_the_publishers_own(self, house: House) -> None:
        first, second = house.publishers()
        payload_id = house.reserve(first, 0).payload_id

        with pytest.raises(NotAllowedError, match="none of this publisher's"):
            house.seal(first, payload_id, extent=house.extent(second))
        with pytest.raises(ReservationLapsedError):
            house.seal(first, payload_id)

    @pytest.mark.parametrize(
        "changes",
        [
            {"offset_bytes": 64 * PAGE},
            {"offset_bytes": -1},
            {"size_bytes": 1},
            {"slot": 1 << 20},
            {"generation": 3},
        ],
    )
    def test_refuses_an_extent_that_cannot_be(
        self, house: House, changes: dict[str, object]
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        payload_id = house.reserve(publisher, 0).payload_id
        bad = house.extent(publisher, **changes)  # type: ignore[arg-type]

        with pytest.raises(PayloadInvalidError, match="the extent of"):
            house.seal(publisher, payload_id, extent=bad)

    def test_refuses_room_that_somebody_reads(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        lease = house.take(reader, 0).leases[0]
        assert lease.extent is not None

        payload_id = house.reserve(publisher, 1).payload_id
        with pytest.raises(PayloadInvalidError, match="touches the one"):
            house.seal(publisher, payload_id, extent=replace(lease.extent, slot=77, generation=4))

    def test_the_same_rows_again_need_the_same_bytes(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        first = house.reserve(publisher, 0).payload_id
        house.seal(publisher, first, digest="d")
        again = house.reserve(publisher, 0)
        assert again.is_repeat

        with pytest.raises(PayloadConflictError, match="sealed before with digest d"):
            house.seal(publisher, again.payload_id, digest="e")
        again = house.reserve(publisher, 0)
        house.seal(publisher, again.payload_id, digest="d")
        house.seal(publisher, again.payload_id, digest="d")

        assert house.hear(publisher) == (again.payload_id,)
        assert house.registered() == (PAGE, 0)

    @pytest.mark.parametrize(("first", "says"), [(7, "with 7 positions"), (None, "without a loss")])
    def test_the_same_rows_again_need_the_same_mask_or_none(
        self, house: House, first: int | None, says: str
    ) -> None:
        (publisher,) = house.publishers(dp=1)

        def seal(**given: object) -> None:
            payload_id = house.reserve(publisher, 0).payload_id
            house.seal(publisher, payload_id, digest="d", **given)  # type: ignore[arg-type]

        seal(valid_count=first)
        seal(valid_count=first)
        seal()
        with pytest.raises(PayloadConflictError, match=f"{says}.* now have 8"):
            seal(valid_count=8)

        reader = house.read_as()
        assert house.take(reader, 0).global_count == first

    def test_a_repeat_of_what_had_no_digest_is_compared_by_reading(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        first = house.register(publisher, 0)
        again = house.reserve(publisher, 0).payload_id

        with house.ledger.pin_repeated(publisher.session_id, again) as pinned:
            assert pinned is not None
            assert pinned.payload.payload_id == first
        house.ledger.seal_payload(
            publisher.session_id,
            again,
            extent=house.extent(publisher),
            bad_row_count=0,
            valid_count=None,
            digest="d",
            repeated_digest="d",
        )

        assert house.hear(publisher) == (again,)

    def test_a_repeat_without_a_digest_is_refused(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        house.register(publisher, 0)
        again = house.reserve(publisher, 0).payload_id

        with pytest.raises(PayloadInvalidError, match="with their digest"):
            house.seal(publisher, again)

    def test_counts_must_be_possible(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        payload_id = house.reserve(publisher, 0).payload_id

        with pytest.raises(PayloadInvalidError, match=r"valid_count.*25; it can be 0 to 24"):
            house.seal(publisher, payload_id, valid_count=25)


class TestStreamingPublishers:
    def test_write_into_the_servers_slabs(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1, local=False)
        reader = house.read_as()
        payload_id = house.reserve(publisher, 0).payload_id
        extent = house.take_room(publisher, payload_id)
        assert house.take_room(publisher, payload_id) == extent
        assert not house.slots.lets_in(extent)
        house.write(publisher, payload_id)
        house.seal(publisher, payload_id)

        (lease,) = house.take(reader, 0).leases

        assert (lease.writer_id, lease.extent) == (SERVER_WRITER, extent)
        assert house.slots.lets_in(extent)

    def test_cannot_seal_before_all_bytes_have_come(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1, local=False)
        payload_id = house.reserve(publisher, 0).payload_id
        house.take_room(publisher, payload_id)

        with pytest.raises(PayloadInvalidError, match="has 0 of its"):
            house.seal(publisher, payload_id)
        assert house.used() == (0, 0)

    def test_have_one_writer_that_keeps_the_room_whatever_happens(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1, local=False)
        payload_id = house.reserve(publisher, 0).payload_id
        house.take_room(publisher, payload_id)

        with house.ledger.writing(publisher.session_id, payload_id) as writing:
            writing.advance(256)
            assert writing.offset_bytes == 256
            with pytest.raises(RequestInvalidError):
                writing.advance(255)
            with (
                pytest.raises(NotAllowedError, match="being written already"),
                house.ledger.writing(publisher.session_id, payload_id),
            ):
                pass
            house.ledger.close_session(publisher.session_id)
            assert house.used() == (1, 0)

        assert house.used() == (0, 0)

    def test_wait_where_the_lowest_open_step_would_lose_its_room(self) -> None:
        house = House(limits=Limits(pool_size_bytes=3 * PAGE, slab_size_bytes=3 * PAGE))
        first, second = house.publishers(local=False)
        house.register(first, 0)
        house.register(second, 0)
        house.register(first, 1)  # takes the last page, which step 1 needs only half of

        ahead = House(limits=Limits(pool_size_bytes=3 * PAGE, slab_size_bytes=3 * PAGE))
        first, second = ahead.publishers(local=False)
        ahead.register(first, 0)
        ahead.register(first, 1)
        with pytest.raises(PoolFullError, match=r"step 2 waits.*1 payloads of 4096 bytes"):
            ahead.register(first, 2)

        ahead.register(second, 0)

    def test_that_bring_a_foreign_slab_are_refused(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1, local=False)

        with pytest.raises(NotAllowedError, match="it streams"):
            house.ledger.add_foreign_slab(publisher.session_id, "mine", PAGE)


class TestSteps:
    def test_a_rank_gets_its_rows_of_every_shard_in_global_order(self, house: House) -> None:
        publishers = house.publishers(dp=3)
        reader = house.read_as(student(dp=2, rank=1))
        for publisher in reversed(publishers):
            house.register(publisher, 0, valid_count=5)

        grant = house.take(reader, 0)

        assert rows_of(grant) == [(4, 4), (8, 4)]
        assert (grant.real_rows, grant.global_count) == (12, 15)

    def test_nothing_is_granted_of_half_a_step(self, house: House) -> None:
        first, _ = house.publishers()
        reader = house.read_as(student(dp=2))
        house.register(first, 0)

        assert house.ledger.take_step(reader, "r", 0) is None
        assert house.ledger.lease_count() == 0
        assert "6 of its 12 rows are sealed; not reserved: shard 1" in house.ledger.lacking(
            reader, 0
        )

    def test_a_streamed_lease_is_of_the_ranks_rows_alone(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as(student(dp=3, rank=1), local=False)
        payload_id = house.register(publisher, 0)

        (lease,) = house.take(reader, 0).leases

        assert (lease.payload.first_row, lease.payload.row_count) == (4, 4)
        assert lease.payload.position_count == 8
        with house.ledger.pin(reader, lease.lease_id) as pinned:
            assert pinned.payload == lease.payload
            assert pinned.payload.payload_id == payload_id
            assert pinned.writer_id == publisher.writer_id
            ids, whole = pinned.segments[0], house.payload(publisher, 0, publisher.rows)
            assert ids.source_offset_bytes == 8 * 4 * 4  # eight positions of four int32
            assert ids.size_bytes == whole.columns[0].size_bytes // 3

    def test_a_retry_gets_the_same_grant(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)

        assert house.ledger.take_step(reader, "r", 0) == house.ledger.take_step(reader, "r", 0)
        assert house.ledger.lease_count() == 1

    def test_a_grant_that_was_given_up_was_not_read(self, house: House) -> None:
        first, second = house.publishers()
        reader = house.read_as()
        for publisher in (first, second):
            house.register(publisher, 0)
        house.ledger.take_step(reader, "r", 0)

        house.ledger.release_request(reader, "r")

        assert house.ledger.lease_count() == 0
        with pytest.raises(RequestInvalidError, match="given up"):
            house.ledger.take_step(reader, "r", 0)
        house.give_back(reader, house.take(reader, 0))
        with pytest.raises(PayloadRetiredError):
            house.ledger.take_step(reader, "again", 0)

    def test_a_writer_of_whom_only_a_lost_answer_told_is_told_of_again(self, house: House) -> None:
        (first,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.close_session(first.session_id)
        second = house.publish_as(first.profile)
        house.register(second, 0)
        house.ledger.take_step(reader, "lost", 0)
        house.ledger.release_request(reader, "lost")

        (settlement,) = house.take(reader, 0).settlements

        assert settlement.writer_id == second.writer_id

    def test_a_rank_of_padding_gets_a_grant_without_leases(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        readers = [house.read_as(student(dp=2, rank=rank)) for rank in range(2)]
        house.register(publisher, 0, rows=range(0, 6), real_rows=6)

        grants = [house.take(reader, 0) for reader in readers]

        assert [len(grant.leases) for grant in grants] == [1, 0]
        assert grants[1].real_rows == 6
        house.give_back(readers[0], grants[0])
        with pytest.raises(PayloadRetiredError):
            house.take(readers[1], 0)

    def test_a_payload_by_its_id_is_leased_whole(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as(student(dp=3, rank=1), local=False)
        payload_id = house.register(publisher, 0)

        lease = house.ledger.acquire(session_id=reader, request_id="r", payload_id=payload_id)

        assert lease.payload.row_count == 12

    def test_another_teachers_payload_is_not(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        house.publish_as(teacher(dp=1, teacher_id="other"))
        reader = house.read_as(student(teacher_id="other"))
        payload_id = house.register(publisher, 0)

        with pytest.raises(PayloadInvalidError, match="teacher_id"):
            house.ledger.acquire(session_id=reader, request_id="r", payload_id=payload_id)

    def test_sealed_steps_may_still_be_had_while_the_server_drains(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        payload_id = house.reserve(publisher, 0).payload_id
        house.ledger.drain()
        house.seal(publisher, payload_id)

        assert house.ledger.lease_count() == 0
        assert house.take(reader, 0).leases


class TestAStepThatWasGivenUp:
    def test_has_its_room_kept_while_a_student_waits_for_it(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 2)
        given_up = house.reserve(publisher, 0)

        house.ledger.abandon_payload(publisher.session_id, given_up.payload_id)

        assert house.reserve(publisher, 1).lowest_open_step == 0
        house.register(publisher, 0)
        assert [each.step for each in house.mail(reader)] == [0]
        assert house.reserve(publisher, 2).lowest_open_step > 0

    def test_has_it_kept_where_a_call_waits_for_it(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        assert house.ledger.take_step(reader, "mine", 0) is None
        given_up = house.reserve(publisher, 0)

        house.ledger.abandon_payload(publisher.session_id, given_up.payload_id)

        assert house.reserve(publisher, 1).lowest_open_step == 0


@pytest.mark.parametrize("step", [-1, 2**62, 2**63 - 1])
class TestAStepThatCannotBe:
    def test_is_not_acquired(self, house: House, step: int) -> None:
        house.publishers(dp=1)
        reader = house.read_as()

        with pytest.raises(RequestInvalidError, match=f"step {step} is none.* below {2**62}"):
            house.ledger.take_step(reader, "mine", step)

    def test_is_not_reserved(self, house: House, step: int) -> None:
        (publisher,) = house.publishers(dp=1)

        with pytest.raises(PayloadInvalidError, match=f"from 0 on and below {2**62}"):
            house.reserve(publisher, step)
        assert house.reserve(publisher, 2**62 - 1).lowest_open_step == 2**62


class TestMail:
    def test_wanted_steps_come_once_each_as_they_are_complete(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        told: list[str] = []
        house.ledger.on_mail(told.extend)
        house.register(publisher, 0)
        house.ledger.want_steps(reader, 0, 2)
        assert told == [publisher.session_id, reader]
        assert [each.step for each in house.mail(reader)] == [0]
        assert house.mail(reader) == []

        house.register(publisher, 1)
        house.register(publisher, 2)

        assert told.count(reader) == 2
        assert [each.step for each in house.mail(reader)] == [1]

    def test_a_step_asked_for_again_comes_again_once_it_came_back(self, house: House) -> None:
        publishers = house.publishers()
        readers = [house.read_as(student(dp=2, rank=rank)) for rank in range(2)]
        for publisher in publishers:
            house.register(publisher, 0)
        house.ledger.want_steps(readers[0], 0, 1)
        (grant,) = house.mail(readers[0])
        assert isinstance(grant, StepGrant)

        house.ledger.want_steps(readers[0], 0, 1)
        assert house.mail(readers[0]) == []
        house.give_back(readers[0], grant)
        house.ledger.want_steps(readers[0], 0, 1)

        assert [each.step for each in house.mail(readers[0])] == [0]

    def test_a_step_that_cannot_be_had_fails_for_who_asks_and_not_ahead(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 1)
        house.ledger.line_ended(publisher.session_id, process_alive=False)
        house.ledger.want_steps(reader, 0, 2)
        assert house.mail(reader) == []

        house.ledger.want_steps(reader, 1, 2)

        (failure,) = house.mail(reader)
        assert isinstance(failure, StepFailure)
        assert isinstance(failure.error, ProducerLostError)
        assert house.mail(reader) == []

    def test_is_bounded(self, house: House) -> None:
        house.publishers(dp=1)
        reader = house.read_as()

        for first, count in ((0, 0), (0, MAX_WANTED_STEPS + 1), (-1, 1), (2**62, 1)):
            with pytest.raises(RequestInvalidError, match=f"1 to {MAX_WANTED_STEPS}"):
                house.ledger.want_steps(reader, first, count)

    def test_there_is_none_for_whoever_is_gone(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.ledger.want_steps(reader, 0, 1)
        house.register(publisher, 0)
        house.ledger.close_session(reader)

        assert house.ledger.take_mail(reader) == []
        assert house.ledger.take_mail("nobody") == []

    def test_a_publisher_hears_of_freed_room_once(self, house: House) -> None:
        first, second = house.publishers()
        reader = house.read_as()
        payload_id = house.register(first, 0)
        house.register(second, 0)
        assert house.ledger.take_mail(first.session_id) == []

        house.give_back(reader, house.take(reader, 0))

        freed = RoomFreed(payload_ids=(payload_id,), lowest_open_step=1)
        assert house.ledger.take_mail(first.session_id) == [freed]
        assert house.ledger.take_mail(first.session_id) == []

    def test_a_publisher_hears_of_a_lowest_open_step_that_it_does_not_know(
        self, house: House
    ) -> None:
        first, second = house.publishers()
        told: list[str] = []
        house.ledger.on_mail(told.extend)

        house.register(first, 0, real_rows=6)  # of which the second shard has none

        assert second.session_id in told
        freed = RoomFreed(payload_ids=(), lowest_open_step=1)
        assert house.ledger.take_mail(second.session_id) == [freed]


class TestTheEndOfAPublisher:
    def both(self, house: House) -> tuple[Publisher, Publisher]:
        first, second = house.publishers()
        for publisher in (first, second):
            house.register(publisher, 0)
        return first, second

    def test_loses_what_nobody_has_leased(self, house: House) -> None:
        first, _ = self.both(house)
        reader = house.read_as()

        house.ledger.line_ended(first.session_id, process_alive=False)

        with pytest.raises(ProducerLostError, match="lacks shard 0"):
            house.ledger.take_step(reader, "r", 0)
        assert house.dropped == [first.slab_id]

    def test_leaves_what_somebody_reads_until_it_comes_back(self, house: House) -> None:
        first, second = self.both(house)
        readers = [house.read_as(student(dp=2, rank=rank)) for rank in range(2)]
        grant = house.take(readers[0], 0)

        house.ledger.line_ended(first.session_id, process_alive=False)

        house.ledger.may_open(readers[0], first.slab_id)
        assert house.dropped == []
        house.give_back(readers[0], grant)
        assert house.dropped == [first.slab_id]
        with pytest.raises(ProducerLostError):
            house.ledger.take_step(readers[1], "r", 0)
        assert second.slab_id not in house.dropped

    def test_grants_what_is_leased_to_others_until_it_comes_back(self, house: House) -> None:
        first, _ = self.both(house)
        readers = [house.read_as(student(student_id=name)) for name in "ab"]
        grant = house.take(readers[0], 0)
        house.ledger.line_ended(first.session_id, process_alive=False)

        other = house.take(readers[1], 0)
        house.give_back(readers[0], grant)

        assert house.take(readers[1], 0).leases
        house.give_back(readers[1], other)

    def test_in_good_order_leaves_everything(self, house: House) -> None:
        first, second = self.both(house)
        unsealed = house.reserve(first, 1).payload_id
        reader = house.read_as()

        house.ledger.close_session(first.session_id)
        house.ledger.line_ended(first.session_id, process_alive=False)

        assert house.ledger.reserved(first.session_id, unsealed) is None
        grant = house.take(reader, 0)
        house.ledger.may_open(reader, first.slab_id)
        house.give_back(reader, grant)
        assert house.dropped == [first.slab_id]
        assert len(house.hear(second)) == 1

    def test_lets_a_student_in_while_something_is_left_to_read(self, house: House) -> None:
        first, second = self.both(house)
        for publisher in (first, second):
            house.ledger.close_session(publisher.session_id)

        reader = house.read_as()
        house.give_back(reader, house.take(reader, 0))

        with pytest.raises(TeacherIncomplete):
            house.open(student(student_id="late"))

    def test_fails_who_waits_for_what_it_had_reserved_and_another_may_write_it(
        self, house: House
    ) -> None:
        first, second = house.publishers()
        reader = house.read_as()
        house.register(second, 0)
        house.reserve(first, 0)
        house.ledger.want_steps(reader, 0, 1)
        assert house.mail(reader) == []

        house.ledger.line_ended(first.session_id, process_alive=False)

        (failure,) = house.mail(reader)
        assert isinstance(failure, StepFailure)
        assert isinstance(failure.error, ProducerLostError)
        with pytest.raises(ProducerLostError, match=r"shard 0.*before it was sealed"):
            house.take(reader, 0)
        successor = house.publish_as(first.profile)
        payload_id = house.reserve(successor, 0).payload_id
        assert house.ledger.take_step(reader, "again", 0) is None
        house.seal(successor, payload_id)
        assert rows_of(house.take(reader, 0)) == [(0, 6), (6, 6)]

    def test_its_shard_may_be_written_again_by_another(self, house: House) -> None:
        first, _ = self.both(house)
        reader = house.read_as()
        house.ledger.line_ended(first.session_id, process_alive=True)

        house.register(house.publish_as(first.profile), 0)

        assert rows_of(house.take(reader, 0)) == [(0, 6), (6, 6)]

    def test_by_its_ttl_is_a_loss_too_where_it_streams(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1, local=False)
        reader = house.read_as()
        house.register(publisher, 0)
        house.clock.advance(30)
        house.ledger.sweep()

        with pytest.raises(ProducerLostError):
            house.ledger.take_step(reader, "r", 0)
        assert house.used() == (0, 0)

    def test_nobody_there_lets_the_teacher_begin_anew(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        house.give_back(reader, house.take(reader, 0))
        house.ledger.close_session(reader)
        house.ledger.line_ended(publisher.session_id, process_alive=False)
        assert house.ledger.teachers() == ()

        house.register(house.publish_as(teacher(dp=1)), 0)

        assert house.take(house.read_as(), 0).leases


class TestTheEndOfAReader:
    def test_frees_nothing_that_the_step_keeps(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        house.take(reader, 0)

        house.ledger.line_ended(reader, process_alive=False)

        assert house.registered() == (PAGE, 0)
        assert house.take(house.read_as(), 0).leases

    def test_leaves_a_retired_payload_in_quarantine_where_it_may_still_read(
        self, house: House
    ) -> None:
        (publisher,) = house.publishers(dp=1)
        stays, goes = (house.read_as(student(student_id=name)) for name in "ab")
        house.register(publisher, 0)
        lease = house.take(goes, 0).leases[0]
        house.give_back(stays, house.take(stays, 0))

        house.ledger.line_ended(goes, process_alive=True)
        assert house.registered() == (0, PAGE)
        assert house.hear(publisher) == ()

        house.ledger.release(goes, lease.lease_id)
        assert house.registered() == (0, 0)
        assert len(house.hear(publisher)) == 1

    def test_doubts_the_leases_that_look_into_slabs_and_no_streamed_ones(
        self, house: House
    ) -> None:
        streams = house.publish_as(teacher(shard=0), local=False)
        shares = house.publish_as(teacher(shard=1))
        stays = house.read_as(student(student_id="a"))
        goes = house.in_process(student(student_id="b"))
        for publisher in (streams, shares):
            house.register(publisher, 0)
        assert [lease.extent is None for lease in house.take(goes, 0).leases] == [False, True]
        house.give_back(stays, house.take(stays, 0))
        house.clock.advance(20)
        house.ledger.renew(streams.session_id)
        house.clock.advance(10)

        assert house.ledger.sweep() == [goes]

        assert house.used() == (0, 1)
        assert house.registered() == (0, 0)

    def test_too_much_in_quarantine_refuses_the_writers_next(self) -> None:
        house = House(limits=Limits(max_quarantine=0.01))
        (publisher,) = house.publishers(dp=1)
        stays, goes = (house.read_as(student(student_id=name)) for name in "ab")
        house.register(publisher, 0)
        house.take(goes, 0)
        house.give_back(stays, house.take(stays, 0))
        house.ledger.line_ended(goes, process_alive=True)

        with pytest.raises(PoolFullError, match="--max-quarantine"):
            house.reserve(publisher, 1)

    def test_a_closed_session_counts_until_its_last_lease_is_back(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        grant = house.take(reader, 0)

        house.ledger.close_session(reader)
        house.give_back(reader, grant)

        assert len(house.hear(publisher)) == 1


def test_an_id_is_good_for_one_step(house: House) -> None:
    (publisher,) = house.publishers(dp=1)
    reader = house.read_as()
    for step in range(2):
        house.register(publisher, step)
    house.ledger.take_step(reader, "mine", 0)

    with pytest.raises(RequestInvalidError, match="another call"):
        house.ledger.take_step(reader, "mine", 1)
    with pytest.raises(RequestInvalidError, match="another call"):
        house.ledger.acquire(
            session_id=reader, request_id="mine", payload_id=house.register(publisher, 2)
        )


def test_who_waits_for_room_is_told_of_the_first_steps_and_ranks(house: House) -> None:
    (publisher,) = house.publishers(dp=1)
    for rank in range(12):
        house.read_as(student(dp=12, rank=rank, student_id="many"))
    for step in range(5):
        house.register(publisher, step)

    ranks = ", ".join(f"many:{rank}" for rank in range(8))
    assert house.ledger.held_by(publisher.session_id) == "; ".join(
        [*(f"step {step} waits for {ranks} and 4 more" for step in range(3)), "2 steps more"]
    )


def test_ids_of_an_older_server_say_so(house: House) -> None:
    (publisher,) = house.publishers(dp=1)
    for call in (
        lambda: house.ledger.want_steps(old_id("s"), 0, 1),
        lambda: house.ledger.take_step(old_id("s"), "r", 0),
        lambda: house.ledger.add_foreign_slab(old_id("s"), "x", 1),
        lambda: house.ledger.abandon_payload(old_id("s"), "p"),
        lambda: house.reserve(replace(publisher, session_id=old_id("s")), 0),
        lambda: house.ledger.reclaim_session(old_id("s")),
    ):
        with pytest.raises(EpochChangedError):
            call()


def test_the_view_shows_publishers_steps_and_what_they_wait_for(house: House) -> None:
    first, second = house.publishers()
    reader = house.read_as(student(dp=2, student_id="run-7"))
    for publisher in (first, second):
        house.register(publisher, 0)
    house.register(first, 1)
    house.take(reader, 0)

    view = house.ledger.view()

    assert [(each.kind, each.student_id) for each in view.sessions] == [
        ("publisher", ""),
        ("publisher", ""),
        ("student", "run-7"),
    ]
    assert [(each.step, each.stage, each.sealed_rows) for each in view.steps] == [
        (0, "complete", 12),
        (1, "open", 6),
    ]
    assert (view.steps[0].waiting_ranks, view.steps[0].waits_for) == (2, ("run-7:0", "run-7:1"))
    assert (view.registered.payload_count, view.registered.payload_bytes) == (3, 3 * PAGE)
    assert view.registered.slab_count == 2
    assert house.ledger.held_by(first.session_id) == "step 0 waits for run-7:0, run-7:1"


def test_steps_go_unread_where_the_server_keeps_only_some() -> None:
    house = House(limits=Limits(keep_steps=1))
    (publisher,) = house.publishers(dp=1)
    reader = house.read_as()
    first = house.register(publisher, 0)
    house.register(publisher, 1)

    assert house.hear(publisher) == (first,)
    with pytest.raises(PayloadRetiredError, match=r"the lowest step there is.*is 1"):
        house.ledger.take_step(reader, "r", 0)
