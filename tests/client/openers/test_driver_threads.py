"""Calls into a driver that may hang: each by its deadline, and no thread for each behind it."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING

import pytest
from tests.held import running_threads
from tests.processes.test_fifty_steps import await_true

from teacher_logits.device_memory import DeviceError
from teacher_logits.errors import DeadlinePassedError
from teacher_logits_client.openers import driver_threads
from teacher_logits_client.openers.driver_threads import DriverThreads

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 30.0


class Hanging:
    """A call that hangs until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.threads: list[threading.Thread] = []
        self.undone: list[str] = []

    def __call__(self) -> str:
        self.threads.append(threading.current_thread())
        self.let_go.wait(LONG)
        return "late"

    def ask(self, calls: DriverThreads, *, seconds: float = 0.0) -> str:
        until = monotonic() + seconds
        return calls.before(until, self, undo=self.undone.append, what="the hanging call")


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.let_go.set()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_threads, "_MOMENT_SECONDS", 0.0)


def test_what_is_done_in_time_is_returned() -> None:
    found = DriverThreads().before(monotonic() + LONG, lambda: 7, undo=lambda it: None, what="it")
    assert found == 7


def test_what_the_call_raises_is_raised() -> None:
    def refuse() -> int:
        raise DeviceError("no", number=999, name="UNKNOWN", call="open")

    with pytest.raises(DeviceError, match="no"):
        DriverThreads().before(monotonic() + LONG, refuse, undo=lambda it: None, what="it")


def test_what_comes_too_late_is_undone(hanging: Hanging) -> None:
    with pytest.raises(DeadlinePassedError, match="not done with the hanging call"):
        hanging.ask(DriverThreads())
    assert not hanging.undone

    hanging.let_go.set()

    await_true(lambda: hanging.undone == ["late"])


@pytest.mark.usefixtures("impatient")
def test_nothing_is_asked_of_a_driver_that_hangs_and_no_thread_is_left_for_it(
    hanging: Hanging,
) -> None:
    calls = DriverThreads()
    with pytest.raises(DeadlinePassedError):
        hanging.ask(calls)
    await_true(lambda: len(hanging.threads) == 1)
    before = running_threads()
    for _ in range(20):
        with pytest.raises(DeadlinePassedError, match=r"the hanging call yet.*nothing more"):
            calls.before(monotonic() + LONG, lambda: 7, undo=lambda it: None, what="another")
    assert not running_threads() - before


@pytest.mark.usefixtures("impatient")
def test_a_driver_that_has_come_back_is_used_as_ever(hanging: Hanging) -> None:
    calls = DriverThreads()
    with pytest.raises(DeadlinePassedError):
        hanging.ask(calls)
    hanging.let_go.set()
    await_true(lambda: bool(hanging.undone))
    hanging.threads[0].join(LONG)

    assert hanging.ask(calls, seconds=LONG) == "late"


def test_a_slow_one_is_waited_for_a_moment(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = DriverThreads()
    with pytest.raises(DeadlinePassedError):
        hanging.ask(calls)
    monkeypatch.setattr(driver_threads, "_MOMENT_SECONDS", LONG)
    hanging.let_go.set()

    assert hanging.ask(calls, seconds=LONG) == "late"


def test_nobody_waits_for_a_slow_one_beyond_his_own_deadline(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_threads, "_MOMENT_SECONDS", 3600.0)
    calls = DriverThreads()
    for _ in range(2):
        with pytest.raises(DeadlinePassedError):
            hanging.ask(calls)
