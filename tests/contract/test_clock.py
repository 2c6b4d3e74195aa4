"""Clocks, and spans of time as people read them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.clock import ManualClock, span_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.3, "0 s"),
        (0, "0 s"),
        (1e-5, "0 s"),
        (0.0001, "0.0001 s"),
        (0.05, "0.05 s"),
        (7.5, "7.5 s"),
        (12.34, "12.3 s"),
        (59.9, "59.9 s"),
        (60, "1 min"),
        (245, "4 min 5 s"),
        (3599.6, "1 h"),
        (3600, "1 h"),
        (3660, "1 h 1 min"),
        (86400, "1 d"),
        (3 * 86400 + 7200 + 59, "3 d 2 h"),
    ],
)
def test_a_span_is_written_with_its_two_largest_units(seconds: float, text: str) -> None:
    assert span_text(seconds) == text
    assert span_text(timedelta(seconds=seconds)) == text


@given(st.floats(min_value=-1e6, max_value=1e9))
def test_no_span_is_written_with_an_exponent(seconds: float) -> None:
    assert "e" not in span_text(seconds)


def test_a_manual_clock_goes_forward_alone() -> None:
    clock = ManualClock(2.0)

    assert clock.advance(1.5) == clock.now() == 3.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
