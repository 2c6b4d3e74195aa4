"""The table of leases: found by id, session and request, and ended once."""

from __future__ import annotations

import pytest

from teacher_logits.errors import LeaseLostError, NotAllowedError
from teacher_logits_server.lending.leases import Doubt, Lease, Leases


def granted(leases: Leases, lease_id: str, *, session: str = "s", request: str = "r") -> Lease:
    lease = Lease(
        lease_id=lease_id,
        session_id=session,
        request_id=request,
        payload_id="p",
        granted_at=0.0,
    )
    leases.grant(lease)
    return lease


def test_a_lease_is_found_by_its_session_and_id() -> None:
    leases = Leases()
    lease = granted(leases, "l")

    assert leases.get("s", "l") is lease
    assert leases.find("s", "l") is lease


def test_another_sessions_lease_is_not_given_out() -> None:
    leases = Leases()
    granted(leases, "l")

    with pytest.raises(NotAllowedError, match="belongs to another session"):
        leases.find("thief", "l")


def test_a_lease_that_is_not_there_is_lost() -> None:
    leases = Leases()

    assert leases.find("s", "l") is None
    with pytest.raises(LeaseLostError, match="'l'") as caught:
        leases.get("s", "l")
    assert caught.value.facts == {"lease_id": "l", "session_id": "s"}


def test_a_request_finds_the_lease_it_got_and_no_other_sessions() -> None:
    leases = Leases()
    lease = granted(leases, "mine", session="a")
    granted(leases, "theirs", session="b")

    assert leases.of_request("a", "r") is lease
    assert leases.of_request("a", "other") is None


def test_a_session_finds_all_it_holds() -> None:
    leases = Leases()
    first, second = granted(leases, "1", request="x"), granted(leases, "2", request="y")
    granted(leases, "3", session="other")

    assert leases.of_session("s") == [first, second]


def test_nothing_is_left_of_an_ended_lease() -> None:
    leases = Leases()
    lease = granted(leases, "l")

    leases.end(lease)

    assert leases.find("s", "l") is None
    assert leases.of_request("s", "r") is None
    assert leases.of_session("s") == []
    assert list(leases) == []


def test_the_end_of_a_lease_leaves_the_sessions_others() -> None:
    leases = Leases()
    first, second = granted(leases, "1", request="x"), granted(leases, "2", request="y")

    leases.end(first)

    assert leases.of_session("s") == [second]


def test_the_end_of_a_lease_leaves_a_newer_one_of_its_request() -> None:
    leases = Leases()
    old, new = granted(leases, "old"), granted(leases, "new")

    leases.end(old)

    assert leases.of_request("s", "r") is new


def test_a_lease_ends_once() -> None:
    leases = Leases()
    lease = granted(leases, "l")
    leases.end(lease)

    with pytest.raises(KeyError):
        leases.end(lease)


def test_a_lease_in_quarantine_is_still_there() -> None:
    leases = Leases()
    lease = granted(leases, "l")

    leases.quarantine(lease, Doubt.LINE_ENDED)

    assert leases.get("s", "l").quarantined
    assert leases.in_quarantine() == [lease]
