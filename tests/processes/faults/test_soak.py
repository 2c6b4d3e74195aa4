"""A soak: the same cast goes on and on, in peace, and no process has more in the end.

`TEACHER_LOGITS_SOAK_TEACHERS=2000` says how many teachers come and go, one after the other. For
each of them every publisher and student makes a client and lets it go, over shared memory and
the stream in turn; steps are written and read, and rows scored.
"""

import os
from functools import partial

import pytest
from tests.processes.faults.stage import Stage, await_true
from tests.processes.faults.storm_plays import StormPlay
from tests.processes.faults.storms import calm_of
from tests.processes.test_fifty_steps import MIB, Census, is_no_more, settled

TEACHERS = int(os.environ.get("TEACHER_LOGITS_SOAK_TEACHERS", "60"))
WARM = 20
"""Teachers after which heaps have the size that they keep, but for what is kept of the last
1,024 payloads (``LeaseMessages``), some 2 MB.
"""
MOST_GROWTH = 4 * MIB


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_teachers_that_come_and_go_leave_every_process_as_it_was(stage: Stage) -> None:
    found: dict[str, Census] = {}
    for number in range(WARM + TEACHERS):
        if number == WARM:
            found = {name: settled(role.pid) for name, role in stage.cast.living().items()}
        StormPlay(stage, calm_of(number)).play()
    growth: dict[str, int] = {}
    for name, role in stage.cast.living().items():
        await_true(partial(is_no_more, role.pid, found[name]), f"{name} lets go of what it had")
        growth[name] = Census.of(role.pid).private_bytes - found[name].private_bytes
    assert max(growth.values()) < MOST_GROWTH, f"bytes more after {TEACHERS} teachers: {growth}"
