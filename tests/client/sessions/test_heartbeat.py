"""When a remote session is renewed, and when it counts as lost."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest
from tests.held import running_threads

from teacher_logits.clock import ManualClock
from teacher_logits.errors import (
    EpochChangedError,
    ServerUnreachableError,
    SessionExpiredError,
)
from teacher_logits_client.sessions.heartbeat import Heartbeat
from teacher_logits_client.sessions.life import SessionLife

TTL, INTERVAL = 30.0, 10.0
NOBODY = ServerUnreachableError("nobody there")


def a_life(*, ttl: float | None = TTL) -> SessionLife:
    return SessionLife("s-1", ttl=ttl, renew_interval=INTERVAL, now=0.0)


class Server:
    """What the heartbeat calls: answers, or fails as it is told."""

    def __init__(self, clock: ManualClock, *answers: Exception | None) -> None:
        self.clock = clock
        self.answers = list(answers)
        self.calls: list[tuple[float, float]] = []

    def __call__(self, timeout: float) -> None:
        self.calls.append((self.clock.now(), timeout))
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer


def beat(
    life: SessionLife, clock: ManualClock, server: Callable[[float], None], *, beats: int
) -> None:
    """Run a heartbeat whose waits pass in no time, for so many waits."""
    left = [beats]

    def wait(seconds: float) -> bool:
        clock.advance(seconds)
        left[0] -= 1
        return left[0] < 0

    Heartbeat(life, renew=server, lock=threading.Lock(), clock=clock, wait=wait).run()


def test_a_session_is_renewed_at_the_interval() -> None:
    clock = ManualClock()
    server = Server(clock, None, None, None)

    beat(a_life(), clock, server, beats=3)

    assert [at for at, _ in server.calls] == [10.0, 20.0, 30.0]


def test_an_idle_session_lives_for_as_long_as_it_is_renewed() -> None:
    clock = ManualClock()
    life = a_life()

    beat(life, clock, Server(clock, *[None] * 15), beats=15)

    assert clock.now() >= 5 * TTL
    life.check(clock.now())


def test_a_renewal_has_a_deadline_that_ends_before_the_ttl() -> None:
    clock = ManualClock()
    server = Server(clock, *[NOBODY] * 100)

    beat(a_life(), clock, server, beats=20)

    assert all(at + timeout <= TTL for at, timeout in server.calls)
    assert server.calls[0] == (10.0, INTERVAL)


def test_a_failed_renewal_is_tried_again_soon_and_often() -> None:
    clock = ManualClock()
    server = Server(clock, NOBODY, NOBODY, None, None)

    beat(a_life(), clock, server, beats=4)

    assert [at for at, _ in server.calls] == [10.0, 11.0, 12.0, 22.0]


def test_a_session_that_was_not_renewed_for_its_ttl_is_lost_and_says_why() -> None:
    clock = ManualClock()
    life = a_life()

    beat(life, clock, Server(clock, *[NOBODY] * 100), beats=100)

    with pytest.raises(SessionExpiredError, match=r"its TTL is 30 s .*nobody there") as caught:
        life.check(clock.now())
    assert caught.value.facts["ttl_seconds"] == TTL
    assert life.wait_before_renewal(clock.now()) is None


def test_a_session_lives_while_renewals_fail_for_less_than_its_ttl() -> None:
    life = a_life()
    life.renewal_failed(NOBODY, now=29.9)

    life.check(29.9)


def test_a_renewal_whose_connection_was_let_go_of_is_one_that_failed() -> None:
    clock = ManualClock()
    life = a_life()
    server = Server(clock, CancelledError("the renewal was cancelled"), None)

    beat(life, clock, server, beats=2)

    assert [at for at, _ in server.calls] == [10.0, 11.0]
    life.check(clock.now())


def test_a_session_that_ended_on_the_server_is_lost_at_once() -> None:
    clock = ManualClock()
    life = a_life()
    server = Server(clock, EpochChangedError("restarted"))

    beat(life, clock, server, beats=5)

    with pytest.raises(EpochChangedError, match="restarted"):
        life.check(clock.now())
    assert len(server.calls) == 1


def test_the_first_reason_stays() -> None:
    life = a_life()
    life.end(EpochChangedError("restarted"))
    life.end(SessionExpiredError("gone"))

    with pytest.raises(EpochChangedError):
        life.check(0.0)


def test_a_lost_session_is_never_revived() -> None:
    life = a_life()
    with pytest.raises(SessionExpiredError):
        life.check(31.0)
    life.renewed(sent=31.0)

    with pytest.raises(SessionExpiredError):
        life.check(31.0)


def test_the_clock_alone_ends_a_session_whose_heartbeat_starved() -> None:
    with pytest.raises(SessionExpiredError, match="for 1 min 30 s"):
        a_life().check(90.0)


def test_a_renewal_counts_from_when_it_was_sent() -> None:
    life = a_life()
    life.renewed(sent=10.0)

    life.check(39.9)
    with pytest.raises(SessionExpiredError):
        life.check(40.0)


def test_a_session_with_a_line_is_never_renewed_and_has_no_ttl() -> None:
    life = a_life(ttl=None)

    assert life.wait_before_renewal(0.0) is None
    life.check(1e9)


def test_a_closed_session_is_renewed_no_more() -> None:
    life = a_life()
    life.close()

    assert life.wait_before_renewal(0.0) is None
    with pytest.raises(SessionExpiredError, match="closed by this client"):
        life.check(0.0)


def test_stopping_ends_the_thread() -> None:
    before = running_threads()  # another test's session may have had this id
    heartbeat = Heartbeat(
        a_life(), renew=lambda seconds: None, lock=threading.Lock(), clock=ManualClock()
    )
    heartbeat.start()
    new = running_threads() - before
    [thread] = [t for t in new if t.name == "teacher-logits-heartbeat-s-1"]

    heartbeat.stop()

    thread.join(timeout=30)
    assert not thread.is_alive()
