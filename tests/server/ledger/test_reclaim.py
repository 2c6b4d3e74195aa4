"""Forced reclaim through the ledger: what comes free, and that the reader is told first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.server.ledger.registering import PAGE, House, Publisher, old_id, student

from teacher_logits.errors import EpochChangedError, LeaseLostError, SessionExpiredError
from teacher_logits.views import Reclaimed

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.terms import StepGrant


class Page:
    """A session's page that knows how things stood when it was written."""

    def __init__(self, look: Callable[[], object] = lambda: None) -> None:
        self.revoked: list[str] = []
        self.seen: list[object] = []
        self.look = look

    def revoke(self, lease_id: str) -> None:
        self.revoked.append(lease_id)
        self.seen.append(self.look())


@pytest.fixture
def house() -> House:
    return House()


def with_page(house: House, session_id: str, page: Page) -> None:
    """Have a session's line come anew, with a page."""
    house.ledger.line_opened(session_id, pid=7, challenge=b"again", started=1, page=page)


def one_read_by_two(house: House, *, local: bool) -> tuple[Publisher, str, StepGrant]:
    """Step 0, returned by one student, and leased to another, which comes with its grant."""
    (publisher,) = house.publishers(dp=1, local=local)
    stays, other = (house.read_as(student(student_id=name)) for name in "ab")
    house.register(publisher, 0)
    grant = house.take(other, 0)
    house.give_back(stays, house.take(stays, 0))
    return publisher, other, grant


class TestALease:
    def test_in_quarantine_ends_and_its_room_is_barred(self, house: House) -> None:
        _, goes, grant = one_read_by_two(house, local=False)
        (lease,) = grant.leases
        house.ledger.line_ended(goes, process_alive=True)
        assert lease.extent is not None
        assert house.used() == (0, 1)

        reclaimed = house.ledger.reclaim_lease(lease.lease_id)

        assert reclaimed == Reclaimed(freed_bytes=PAGE, lease_count=1)
        assert house.used() == (0, 0)
        assert not house.slots.lets_in(lease.extent)
        with pytest.raises(LeaseLostError):
            house.ledger.reclaim_lease(lease.lease_id)

    def test_that_others_share_frees_nothing_and_its_reader_is_told(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        one, other = (house.read_as(student(student_id=name)) for name in "ab")
        page, others = Page(), Page()
        with_page(house, one, page)
        with_page(house, other, others)
        house.register(publisher, 0)
        lease = house.take(one, 0).leases[0]
        house.take(other, 0)

        assert house.ledger.reclaim_lease(lease.lease_id) == Reclaimed(lease_count=1)

        assert house.registered() == (PAGE, 0)
        assert page.revoked == [lease.lease_id]
        assert others.revoked == []

    def test_tells_its_reader_before_the_room_is_anybody_elses(self, house: House) -> None:
        _, reader, grant = one_read_by_two(house, local=False)
        (lease,) = grant.leases
        extent = lease.extent
        assert extent is not None
        page = Page(lambda: house.slots.lets_in(extent))
        with_page(house, reader, page)
        house.ledger.line_ended(reader, process_alive=True)

        house.ledger.reclaim_lease(lease.lease_id)

        assert (page.revoked, page.seen) == ([lease.lease_id], [True])
        assert not house.slots.lets_in(extent)

    def test_was_not_read_and_its_step_waits_for_the_rank(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        lease = house.take(reader, 0).leases[0]

        house.ledger.reclaim_lease(lease.lease_id)
        house.ledger.release(reader, lease.lease_id)

        assert [step.step for step in house.ledger.view().steps] == [0]
        house.give_back(reader, house.take(reader, 0))
        assert house.ledger.view().steps == ()

    def test_of_who_looks_into_no_slab_is_told_to_nobody(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as(local=False)
        house.register(publisher, 0)

        reclaimed = house.ledger.reclaim_lease(house.take(reader, 0).leases[0].lease_id)

        assert reclaimed == Reclaimed(lease_count=1)


class TestASession:
    def test_ends_with_its_leases_and_the_writer_is_told(self, house: House) -> None:
        publisher, stopped, _ = one_read_by_two(house, local=True)

        reclaimed = house.ledger.reclaim_session(stopped)

        assert reclaimed == Reclaimed(freed_bytes=PAGE, lease_count=1, session_count=1)
        assert len(house.hear(publisher)) == 1
        with pytest.raises(SessionExpiredError):
            house.ledger.renew(stopped)
        with pytest.raises(SessionExpiredError):
            house.ledger.reclaim_session(stopped)

    def test_of_which_only_quarantine_is_left_is_no_session_more(self, house: House) -> None:
        _, gone, _ = one_read_by_two(house, local=True)
        house.ledger.line_ended(gone, process_alive=True)

        reclaimed = house.ledger.reclaim_session(gone)

        assert reclaimed == Reclaimed(freed_bytes=PAGE, lease_count=1, session_count=0)
        assert house.ledger.view().leases == ()

    def test_of_a_publisher_loses_what_nobody_has_leased(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        house.register(publisher, 0)

        reclaimed = house.ledger.reclaim_session(publisher.session_id)

        assert reclaimed == Reclaimed(freed_bytes=PAGE, session_count=1)
        assert house.registered() == (0, 0)


class TestTheQuarantine:
    def test_is_emptied_and_nothing_else(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        stays, goes = (house.read_as(student(student_id=name)) for name in "ab")
        house.register(publisher, 0)
        kept = house.take(stays, 0)
        house.take(goes, 0)
        house.ledger.line_ended(goes, process_alive=True)

        assert house.ledger.reclaim_quarantined() == Reclaimed(lease_count=1)

        assert [lease.lease_id for lease in house.ledger.view().leases] == [
            lease.lease_id for lease in kept.leases
        ]
        assert house.ledger.reclaim_quarantined() == Reclaimed()

    def test_says_why_and_of_which_process(self, house: House) -> None:
        _, gone, _ = one_read_by_two(house, local=True)
        house.ledger.line_ended(gone, process_alive=True)

        view = house.ledger.view()

        assert [(lease.quarantined, lease.doubt) for lease in view.leases] == [(True, "line_ended")]
        found = {session.session_id: session for session in view.sessions}[gone]
        assert (found.state, found.pid) == ("ended", 7)

    def test_ends_with_the_process(self, house: House) -> None:
        publisher, gone, _ = one_read_by_two(house, local=True)
        assert house.ledger.line_ended(gone, process_alive=True)

        house.ledger.process_ended(gone)
        house.ledger.process_ended(gone)

        assert house.registered() == (0, 0)
        assert len(house.hear(publisher)) == 1
        assert gone not in {session.session_id for session in house.ledger.view().sessions}

    def test_of_a_ttl_knows_of_no_process_that_could_end(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1, local=False)
        reader = house.in_process(student())
        house.register(publisher, 0)
        house.take(reader, 0)
        house.clock.advance(house.ledger.terms(reader).ttl.total_seconds())
        assert reader in house.ledger.sweep()

        house.ledger.process_ended(reader)

        assert [lease.doubt for lease in house.ledger.view().leases] == ["ttl_passed"]


def test_a_process_that_ends_while_its_session_lives_frees_nothing(house: House) -> None:
    (publisher,) = house.publishers(dp=1)
    reader = house.read_as()
    house.register(publisher, 0)
    house.take(reader, 0)

    house.ledger.process_ended(reader)

    assert len(house.ledger.view().leases) == 1


def test_nothing_is_in_doubt_where_the_line_took_no_lease_along(house: House) -> None:
    house.publishers(dp=1)
    reader = house.read_as()

    assert not house.ledger.line_ended(reader, process_alive=True)


def test_ids_of_an_older_server_say_so(house: House) -> None:
    with pytest.raises(EpochChangedError):
        house.ledger.reclaim_session(old_id("s"))
    with pytest.raises(EpochChangedError):
        house.ledger.reclaim_lease(old_id("l"))


@pytest.mark.parametrize(
    ("renewals", "local", "state"),
    [(1.9, False, "alive"), (2, False, "silent"), (9, True, "alive")],
)
def test_one_without_a_line_that_missed_a_renewal_is_silent(
    house: House, renewals: float, local: bool, state: str
) -> None:
    house.publishers(dp=1)
    reader = house.read_as(local=local)
    interval = house.ledger.terms(reader).renew_interval.total_seconds()

    house.clock.advance(renewals * interval)

    states = {session.session_id: session.state for session in house.ledger.view().sessions}
    assert states[reader] == state
