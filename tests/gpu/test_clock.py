"""The seconds of the GPU check: shared out, and enough for one part more or not."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gpu.clock import LAST_SECONDS, LEAST_SECONDS, Clock, limits
from tests.gpu.running import SECONDS, STAGES

LONG = 3600.0


@given(
    st.lists(st.floats(5, 60), min_size=1, max_size=25), st.floats(300, 600), st.floats(0.0, 5.0)
)
def test_all_stages_are_done_in_time_and_each_may_begin_whatever_the_others_take(
    shares: list[float], seconds: float, takes: float
) -> None:
    """Each takes so many of its shares, or hangs until it is ended."""
    now = 0.0
    for number, share in enumerate(shares):
        limit = limits(shares, number, seconds=seconds, now=now)
        own = share * seconds / sum(shares)
        assert limit.soft <= limit.hard <= seconds
        assert limit.hard - now >= min(own, LEAST_SECONDS) - 1e-6
        now = min(limit.hard, now + takes * own)
    assert now <= seconds


@given(st.lists(st.floats(5, 60), min_size=1, max_size=25), st.data())
def test_what_a_stage_leaves_the_next_ones_have(shares: list[float], data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(shares) - 1))
    planned = SECONDS * sum(shares[: number + 1]) / sum(shares)
    limit = limits(shares, number, seconds=SECONDS, now=0.0)
    assert limit.soft == pytest.approx(min(planned, limit.hard))


def test_the_whole_check_fits_into_eight_minutes_and_each_stage_into_its_share() -> None:
    shares = [stage.share for stage in STAGES]
    assert SECONDS <= 8 * 60
    assert min(shares) * SECONDS / sum(shares) > LEAST_SECONDS + LAST_SECONDS


def test_all_parts_are_gone_through_where_there_is_time() -> None:
    told: list[str] = []
    clock = Clock(until=time.monotonic() + LONG, tell=told.append)
    assert list(clock.through("abc", what="letters")) == ["a", "b", "c"]
    assert clock.skipped == []
    assert told == ["letters 1 of 3", "letters 2 of 3", "letters 3 of 3"]


def test_one_part_is_gone_through_in_any_case_and_the_others_are_said_to_be_left_out() -> None:
    clock = Clock(until=time.monotonic())
    assert list(clock.through("abc", what="letters")) == ["a"]
    assert clock.skipped == ["2 of 3 letters"]


def test_a_part_is_left_out_for_which_the_time_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest so far took ten seconds, and there are nine left."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = Clock(until=now + 10.0 + 1.0 + 9.0 + LAST_SECONDS)
    gone = []
    for part, takes in zip(clock.through("abcd", what="letters"), (10.0, 1.0, 0.0), strict=False):
        gone.append(part)
        now += takes
    assert gone == ["a", "b"]
    assert clock.skipped == ["2 of 4 letters"]
