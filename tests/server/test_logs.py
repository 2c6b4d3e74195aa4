"""The log: an event and its facts a line, as text or as JSON."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.clock import ManualClock
from teacher_logits.pool import PoolUsage
from teacher_logits_server import logs
from teacher_logits_server.services.state_log import StateLog

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGGER = logging.getLogger("teacher_logits_server.somewhere")


class Log:
    """What was logged in one format."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture(params=["text", "json"])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    log = Log()
    handler = logs.configure(format=request.param, level="info", stream=log.stream)
    yield log
    logs.unconfigure(handler)


@pytest.fixture
def json_log() -> Iterator[Log]:
    log = Log()
    handler = logs.configure(format="json", level="info", stream=log.stream)
    yield log
    logs.unconfigure(handler)


@pytest.fixture
def text_log() -> Iterator[Log]:
    log = Log()
    handler = logs.configure(format="text", level="info", stream=log.stream)
    yield log
    logs.unconfigure(handler)


def test_text_puts_the_facts_behind_the_event(text_log: Log) -> None:
    LOGGER.warning("session ended", extra={"facts": {"id": "s-1", "why": "two words", "to": ""}})

    assert text_log.lines[0].split(" ", 1)[1] == (
        'WARNING session ended id=s-1 why="two words" to=""'
    )


def test_text_shows_a_list_with_commas(text_log: Log) -> None:
    LOGGER.info("ready", extra={"facts": {"transports": ("local", "stream")}})

    assert text_log.lines[0].endswith("transports=local,stream")


def test_json_has_the_event_and_its_facts_apart(json_log: Log) -> None:
    LOGGER.info("session opened", extra={"facts": {"session_id": "s-1", "rank": 3}})

    entry = json.loads(json_log.lines[0])
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "event": "session opened",
        "logger": LOGGER.name,
        "session_id": "s-1",
        "rank": 3,
    }


def test_json_lets_no_fact_hide_the_event(json_log: Log) -> None:
    LOGGER.info("session opened", extra={"facts": {"event": "other", "level": "critical"}})

    entry = json.loads(json_log.lines[0])
    assert (entry["event"], entry["level"]) == ("session opened", "info")


def test_a_failure_brings_its_traceback(log: Log) -> None:
    try:
        raise KeyError("swordfish")
    except KeyError:
        LOGGER.exception("call failed")

    assert "KeyError: 'swordfish'" in log.stream.getvalue()


@given(text=st.text(max_size=40))
def test_a_fact_never_makes_a_second_line(text: str) -> None:
    for name in ("text", "json"):
        log = Log()
        handler = logs.configure(format=name, level="info", stream=log.stream)
        LOGGER.info("event", extra={"facts": {"hostile": text}})
        logs.unconfigure(handler)

        assert len(log.stream.getvalue().splitlines()) == 1


def test_what_is_below_the_level_is_not_logged(log: Log) -> None:
    LOGGER.debug("detail")

    assert log.lines == []


def test_the_log_of_the_program_around_is_left_alone(log: Log) -> None:
    logging.getLogger("elsewhere").error("not ours")

    assert log.lines == []


class TestThrottling:
    """Of what callers bring about as often as they like, few are logged."""

    def test_lets_the_first_of_an_event_and_reason_through_and_counts_the_rest(self) -> None:
        now = [0.0]
        throttle = logs.Throttle(lambda: now[0])

        def logged(event: str, times: int, **more: object) -> list[int]:
            """How many were left out before each of those that are logged."""
            made = {"msg": event, "name": LOGGER.name, **more}
            records = [logging.makeLogRecord(made) for _ in range(times)]
            shown = [record for record in records if throttle.filter(record)]
            return [getattr(record, "facts", {}).get("left_out", 0) for record in shown]

        assert logged("refused", 100, throttle="FULL") == [0] * 10
        assert logged("refused", 1, throttle="OTHER") == [0]
        assert logged("session expired", 30) == [0] * 30  # a change of state, each
        assert len(logged("retrying in 1.14s", 30, name="opentelemetry.exporter")) == 10
        now[0] = logs.ALIKE_SECONDS
        assert logged("refused", 100, throttle="FULL") == [90] + [0] * 9

    def test_is_in_place_once_the_log_is_configured(self, text_log: Log) -> None:
        for _ in range(100):
            LOGGER.warning("refused", extra={"throttle": "FULL"})

        assert len(text_log.lines) == logs.MOST_ALIKE


class TestTheServersState:
    """Is logged once a change, with how long it lasted."""

    def test_of_room(self, json_log: Log) -> None:
        clock = ManualClock()
        states = StateLog(clock)
        usage = PoolUsage(
            budget_bytes=8,
            committed_bytes=8,
            used_bytes=5,
            quarantined_bytes=2,
            slab_count=1,
            extent_count=2,
        )
        for full in (False, True, True, False, False):
            states.room(full, lambda: usage)
            clock.advance(1)

        first, second = map(json.loads, json_log.lines)
        assert first["event"] == "pool full"
        assert (first["free_bytes"], first["quarantined_bytes"]) == (1, 2)
        assert (second["event"], second["seconds"]) == ("pool has room again", 2)

    def test_of_health(self, json_log: Log) -> None:
        clock = ManualClock()
        states = StateLog(clock)
        for healthy in (True, False, False, True, True):
            states.health(healthy, lambda: {"broker": False})
            clock.advance(1)

        first, second = map(json.loads, json_log.lines)
        assert (first["event"], first["broker"]) == ("unhealthy", False)
        assert (second["event"], second["seconds"]) == ("healthy again", 2)
