"""Servers that are killed and come back, and the memory that they do and do not need."""

import shutil
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL

import pytest
from tests.processes.faults.oracle import SOCKETS, census_of
from tests.processes.faults.publisher import SHARDS
from tests.processes.faults.stage import Stage, await_true
from tests.processes.faults.step_plays import PEACE, StepPlays
from tests.processes.faults.workers import PATIENCE_SECONDS

KILLS = 20


@pytest.mark.slow
def test_a_server_killed_twenty_times_in_the_middle_of_a_put_leaves_nothing(stage: Stage) -> None:
    caller = stage.student("victim")
    for _ in range(KILLS):
        stage.enter(caller, "shared_memory")
        stage.cast.server.do("arm", name="engine chunk")
        call = caller.ask("cycle", session="it", step=stage.step())
        stage.cast.server.await_point()
        stage.cast.server.signal(SIGKILL)
        caller.error_of(call)
        caller.do("end")
        # And so what the server had written is nowhere.
        await_true(lambda: not census_of(caller).slabs, f"{caller} has no slab")
        stage.cast.start_server()
    assert sorted(path.name for path in stage.cast.place.run.iterdir()) == SOCKETS


def test_a_restarted_server_has_publishers_and_students_register_anew(stage: Stage) -> None:
    plays = StepPlays(stage)
    with plays.company("shared_memory", "shared_memory") as (publishers, reader):
        epoch = stage.cast.inspect().epoch
        stage.cast.server.signal(SIGKILL)
        for role in publishers:
            error = role.error_of(role.ask("publish", step=PEACE + 1))
            assert {"SessionExpiredError", "ServerUnreachableError"} & set(error.kinds), error
        error = reader.error_of(reader.ask("read_step", session="it", step=PEACE + 1))
        assert {"SessionExpiredError", "ServerUnreachableError"} & set(error.kinds), error
        stage.bring_server_back([*publishers, reader])
        assert stage.cast.inspect().epoch != epoch
    with plays.company("shared_memory", "stream") as (publishers, reader):
        assert len(publishers) == SHARDS  # who have published the same step again


@pytest.mark.slow
def test_a_small_dev_shm_does_not_matter() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    script = Path(__file__).with_name("small_shm.py")
    command = f"mount -t tmpfs -o size=64m none /dev/shm && exec {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        check=False,
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "258 MiB\n"
