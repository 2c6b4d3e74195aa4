"""Names of things: ids that carry their epoch, and names that people choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import EpochChangedError, RequestInvalidError
from teacher_logits.keys import check_epoch, check_name, new_epoch, new_id


def test_two_ids_are_never_the_same() -> None:
    assert len({new_id("s", "epoch") for _ in range(1000)}) == 1000
    assert new_epoch() != new_epoch()


def test_an_id_says_what_it_is_and_whose() -> None:
    assert new_id("lease", "1f0a66b2c9de").startswith("lease-1f0a66b2c9de-")


def test_an_id_of_this_epoch_passes() -> None:
    epoch = new_epoch()

    for _ in range(200):  # some of them hold hyphens of their own
        check_epoch(new_id("s", epoch), epoch, what="session")


def test_an_id_of_another_epoch_is_refused_with_both() -> None:
    old = new_id("s", "0123456789ab")

    with pytest.raises(EpochChangedError, match=r"session .* was restarted") as caught:
        check_epoch(old, "ba9876543210", what="session")

    assert caught.value.facts == {"epoch": "ba9876543210", "stale_epoch": "0123456789ab"}


def test_an_older_payload_is_to_be_scored_again_since_the_session_is_well() -> None:
    with pytest.raises(EpochChangedError, match="scored again") as caught:
        check_epoch(new_id("p", "0123456789ab"), "ba9876543210", what="payload")

    assert "session" not in caught.value.message


@given(st.text(st.characters(exclude_characters="-")))
def test_what_is_no_id_at_all_has_no_epoch_to_be_wrong_about(text: str) -> None:
    check_epoch(text, "epoch", what="session")


@pytest.mark.parametrize("name", ["a", "0", "run-7/rank_3.b:c@d", "x" * 128])
def test_a_name_passes_as_it_is(name: str) -> None:
    assert check_name(name, what="student id") == name


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "ä", "a\n", "x" * 129, "a\0"])
def test_what_can_be_no_name_is_refused_by_what_it_names(name: str) -> None:
    with pytest.raises(RequestInvalidError, match="student id") as caught:
        check_name(name, what="student id")

    assert caught.value.facts == {"length": len(name)}


def test_a_refusal_does_not_repeat_a_name_without_end() -> None:
    with pytest.raises(RequestInvalidError) as caught:
        check_name("x" * 1_000_000, what="student id")

    assert len(str(caught.value)) < 400
