"""What refuses a start: a replica that ends, refuses, loads for ever, or loads another teacher."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta

import pytest

from teacher_logits.clock import ManualClock
from teacher_logits.errors import ConfigError, EngineError, TeacherLogitsError
from teacher_logits.terms import Check, Verdict
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import EngineProfile
from teacher_logits_server.replicas.actor import Loaded, Refused
from teacher_logits_server.replicas.starting import load_all

CONFIG = ServerConfig(engine="ray", replicas=2, replica_start=timedelta(seconds=5))
PROFILE = EngineProfile(
    name="e", vocabulary_size=5, head_rows=8, max_row_tokens=9, arithmetic_type="float32"
)
LOADED = Loaded(
    profile=PROFILE,
    check=Check(name="causality", verdict=Verdict.PASSED, detail=""),
    node_id="n0",
    host_name="one",
    pid=4711,
)


class Fleet:
    """Actors of which each has come to something, or has not."""

    def __init__(self, *ends: Loaded | Refused | Exception | None) -> None:
        self.ends = ends

    def begin(self, replica: int, life: int) -> Future[Loaded | Refused]:
        future: Future[Loaded | Refused] = Future()
        end = self.ends[replica]
        if isinstance(end, Exception):
            future.set_exception(end)
        elif end is not None:
            future.set_result(end)
        return future


def refusal(*ends: Loaded | Refused | Exception | None) -> TeacherLogitsError:
    clock = ManualClock(10.0)
    with pytest.raises(TeacherLogitsError) as raised:
        load_all(CONFIG, Fleet(*ends), clock=clock, give_up=10.0)
    return raised.value


def test_replicas_that_load_the_same_are_what_was_wanted() -> None:
    loaded = load_all(CONFIG, Fleet(LOADED, LOADED), clock=ManualClock(0.0), give_up=10.0)
    assert loaded == (LOADED, LOADED)


def test_one_that_loads_for_ever_is_refused_by_the_flag_that_says_how_long_it_may() -> None:
    error = refusal(LOADED, None)
    assert isinstance(error, ConfigError)
    assert (error.facts["flag"], error.facts["replicas"]) == ("--replica-start", "1")


def test_one_that_refuses_is_named_though_others_are_not_done() -> None:
    said = ConfigError("--model x: is not there", facts={"flag": "--model"})
    error = refusal(None, Refused(error=said, host_name="two"))
    assert isinstance(error, ConfigError)
    assert error.message == "replica 1 on two: --model x: is not there"
    assert error.facts == {"flag": "--model", "replica": 1, "host": "two"}


def test_one_that_ends_as_it_loads_is_named() -> None:
    error = refusal(RuntimeError("out of memory"), None)
    assert isinstance(error, EngineError)
    assert error.message == "replica 0 ended while it loaded its teacher: out of memory"


def test_different_teachers_are_refused_with_the_difference() -> None:
    other = replace(LOADED, host_name="two", profile=replace(PROFILE, revision="r2"))
    error = refusal(LOADED, other)
    assert isinstance(error, ConfigError)
    assert "(revision '' and 'r2')" in error.message
    assert "replica 0 on one and replica 1 on two" in error.message
