"""The thread that gives leases back: what goes wrong with one keeps no other from going."""

import threading

import pytest

from teacher_logits.errors import ServerUnreachableError
from teacher_logits_client.payloads import returns
from teacher_logits_client.payloads.returns import Returner


def test_a_fault_in_a_second_try_keeps_no_other_return_from_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(returns, "_RETRY_SECONDS", 0.0)
    delivered, finished = threading.Event(), threading.Event()
    tries = {"faulty": 0, "good": 0}

    def faulty() -> None:
        tries["faulty"] += 1
        raise ServerUnreachableError("away") if tries["faulty"] == 1 else ValueError("a fault")

    def good() -> None:
        tries["good"] += 1
        if tries["good"] == 1:
            raise ServerUnreachableError("away")
        delivered.set()

    returner = Returner(finish=finished.set)
    returner.later(faulty)
    returner.later(good)

    assert delivered.wait(30)
    returner.stop()
    assert finished.wait(30)
    assert tries == {"faulty": 2, "good": 2}
