"""Leases that go back unread, and reservations that were sealed before they are given up."""

from __future__ import annotations

import pytest
from tests.server.ledger.registering import House

from teacher_logits.errors import PayloadRetiredError
from teacher_logits.terms import StepGrant


@pytest.fixture
def house() -> House:
    return House()


class TestAnUnreadReturn:
    @pytest.mark.parametrize("read_first", [True, False])
    def test_of_one_lease_leaves_the_step_to_be_had_again(
        self, house: House, read_first: bool
    ) -> None:
        publishers = house.publishers()
        reader = house.read_as()
        for publisher in publishers:
            house.register(publisher, 0)
        one, other = house.take(reader, 0).leases

        house.ledger.release(reader, one.lease_id, unread=not read_first)
        house.ledger.release(reader, other.lease_id, unread=read_first)

        assert house.ledger.lease_count() == 0
        house.give_back(reader, house.take(reader, 0))
        with pytest.raises(PayloadRetiredError):
            house.take(reader, 0)

    def test_lets_it_be_sent_again_to_who_asks(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        house.register(publisher, 0)
        house.ledger.want_steps(reader, 0, 1)
        (grant,) = house.mail(reader)
        assert isinstance(grant, StepGrant)
        house.ledger.release(reader, grant.leases[0].lease_id, unread=True)

        house.ledger.want_steps(reader, 0, 1)

        (again,) = house.mail(reader)
        assert isinstance(again, StepGrant)
        assert again.leases[0].lease_id != grant.leases[0].lease_id


class TestAbandoning:
    def test_says_that_nothing_was_sealed(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        payload_id = house.reserve(publisher, 0).payload_id
        assert not house.ledger.abandon_payload(publisher.session_id, payload_id)
        assert not house.ledger.abandon_payload(publisher.session_id, payload_id)

    def test_says_that_it_was_sealed_until_its_room_is_free(self, house: House) -> None:
        (publisher,) = house.publishers(dp=1)
        reader = house.read_as()
        payload_id = house.register(publisher, 0)
        grant = house.take(reader, 0)
        assert house.ledger.abandon_payload(publisher.session_id, payload_id)
        house.ledger.release(reader, grant.leases[0].lease_id, unread=True)
        assert house.ledger.abandon_payload(publisher.session_id, payload_id)

        house.give_back(reader, house.take(reader, 0))

        assert not house.ledger.abandon_payload(publisher.session_id, payload_id)
        assert house.hear(publisher) == (payload_id,)
