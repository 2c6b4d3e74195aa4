"""Strangers: connections without a hello, by age and by user."""

from __future__ import annotations

from teacher_logits_server.broker.strangers import MAX_OF_A_USER, Strangers


def test_for_one_too_many_of_a_user_the_oldest_of_its_own_goes() -> None:
    strangers = Strangers(10.0)
    assert strangers.come(1, uid=7, now=0.0) is None
    for fd in range(2, MAX_OF_A_USER + 2):
        assert strangers.come(fd, uid=1, now=1.0) is None

    assert strangers.come(1000, uid=1, now=2.0) == 2
    assert strangers.come(1001, uid=7, now=2.0) is None


def test_who_said_hello_is_no_stranger_and_whose_time_has_come_is_late() -> None:
    strangers = Strangers(10.0)
    for fd in range(3):
        strangers.come(fd, uid=1, now=float(fd))
    strangers.forget(0)
    strangers.forget(0)

    assert strangers.next_time == 11.0
    assert strangers.late(11.5) == [1]
