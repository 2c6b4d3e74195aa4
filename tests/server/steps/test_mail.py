"""Mail: what is kept of a session that is told nothing, and that it stays bounded."""

from __future__ import annotations

import pytest

from teacher_logits.errors import HostCopyNeededError
from teacher_logits_server.steps.mail import MAX_BARRED_STEPS, Mail


def why(step: int) -> HostCopyNeededError:
    return HostCopyNeededError(f"step {step} lies in device memory", facts={"step": step})


def test_a_barred_step_is_refused_with_what_was_noted_each_time() -> None:
    mail = Mail()
    mail.bar("s", 7, why(7))

    for _ in range(2):
        with pytest.raises(HostCopyNeededError, match="step 7 lies") as refusal:
            mail.check_barred("s", 7)
        assert refusal.value.facts == {"step": 7}
    mail.check_barred("s", 8)
    mail.check_barred("another", 7)


def test_of_many_barred_steps_the_highest_are_remembered() -> None:
    mail = Mail()
    last = 3 * MAX_BARRED_STEPS
    for step in range(last):
        mail.bar("s", step, why(step))

    box = mail._boxes["s"]
    assert sorted(box.barred) == list(range(last - MAX_BARRED_STEPS, last))
    mail.check_barred("s", 0)
    with pytest.raises(HostCopyNeededError):
        mail.check_barred("s", last - 1)
