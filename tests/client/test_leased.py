"""When a lease's memory is vacant and its room goes back, whatever the order of events."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits_client.leased import ClientStatistics, LeaseTable, Step

BOTH = [("lease", Step.VACATE), ("lease", Step.RETURN)]


def table(*views: str, copied: bool = False) -> LeaseTable:
    made = LeaseTable()
    made.open("lease", views=views, copied=copied)
    return made


def test_a_closed_lease_without_views_is_vacated_and_then_returned() -> None:
    assert table().close("lease") == BOTH


def test_a_closed_lease_waits_for_its_last_view() -> None:
    leases = table("ids", "tail")

    assert leases.close("lease") == []
    assert leases.view_gone("lease", "ids") == []
    assert leases.view_gone("lease", "tail") == BOTH


def test_views_that_are_gone_before_the_close_are_not_waited_for() -> None:
    leases = table("ids")

    assert leases.view_gone("lease", "ids") == []
    assert leases.close("lease") == BOTH


def test_an_open_lease_stays_although_nobody_views_it() -> None:
    leases = table("ids")
    leases.view_gone("lease", "ids")

    assert leases.statistics().open_leases == 1


@pytest.mark.parametrize("again", ["close", "view_gone"])
def test_nothing_is_due_twice(again: str) -> None:
    leases = table("ids")
    leases.view_gone("lease", "ids")
    leases.close("lease")

    assert (leases.close("lease") if again == "close" else leases.view_gone("lease", "ids")) == []


def test_copied_room_is_returned_at_the_close_and_the_memory_vacated_after_the_last_view() -> None:
    leases = table("ids", copied=True)

    assert leases.close("lease") == [("lease", Step.RETURN)]
    assert leases.view_gone("lease", "ids") == [("lease", Step.VACATE)]


def test_a_forked_child_holds_shared_room_until_it_ends() -> None:
    leases = table()

    assert leases.forked(1)
    assert leases.close("lease") == []
    assert leases.child_ended(1) == BOTH


def test_every_child_is_waited_for() -> None:
    leases = table()
    leases.forked(1)
    leases.forked(2)
    leases.close("lease")

    assert leases.child_ended(2) == []
    assert leases.child_ended(1) == BOTH


def test_a_child_holds_a_closed_lease_that_is_still_viewed() -> None:
    leases = table("ids")
    leases.close("lease")

    assert leases.forked(1)
    assert leases.view_gone("lease", "ids") == []
    assert leases.child_ended(1) == BOTH


def test_a_child_does_not_hold_what_was_copied() -> None:
    leases = table(copied=True)

    assert not leases.forked(1)
    assert ("lease", Step.RETURN) in leases.close("lease")


def test_a_child_does_not_hold_what_was_leased_after_it_was_made() -> None:
    leases = LeaseTable()
    leases.forked(1)
    leases.open("lease", views=(), copied=False)

    assert leases.close("lease") == BOTH


def test_events_about_leases_that_are_done_with_are_fine() -> None:
    leases = LeaseTable()

    assert leases.close("other") == leases.view_gone("other", "ids") == leases.child_ended(7) == []


def test_the_statistics_say_where_leases_are_and_what_became_of_the_others() -> None:
    leases = LeaseTable()
    for name in ("open", "viewed", "held", "dropped"):
        leases.open(name, views={"ids"}, copied=False)
    leases.close("viewed", outlived=True)
    leases.forked(1)
    leases.view_gone("held", "ids")
    leases.close("held")
    leases.open("returned", views=(), copied=False)
    leases.close("returned")
    leases.close("dropped", dropped=True)

    assert leases.statistics() == ClientStatistics(
        open_leases=1,
        viewed_leases=2,
        held_leases=1,
        returned_leases=1,
        outlived_leases=1,
        dropped_leases=1,
    )


def test_statistics_cannot_be_written_to() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LeaseTable().statistics().open_leases = 3  # type: ignore[misc]


EVENTS = st.permutations(["close", "view a", "view b", "child"])


@given(order=EVENTS, copied=st.booleans())
def test_in_any_order_each_step_comes_once_and_only_when_it_may(
    order: list[str], copied: bool
) -> None:
    leases = table("a", "b", copied=copied)
    leases.forked(1)
    happened: set[str] = set()
    done: list[Step] = []
    for event in order:
        happened.add(event)
        if event == "close":
            due = leases.close("lease")
        elif event == "child":
            due = leases.child_ended(1)
        else:
            due = leases.view_gone("lease", event[-1])
        for _, step in due:
            done.append(step)
            unviewed = {"close", "view a", "view b"} <= happened
            if copied:
                assert "close" in happened
                assert step is Step.RETURN or unviewed
            else:
                assert unviewed
                assert "child" in happened

    assert sorted(done, key=str) == [Step.RETURN, Step.VACATE]
