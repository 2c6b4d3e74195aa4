"""The GPU check itself, where there is no GPU: its report, its exits, and its stages over the fake.

What the stages find on the fake proves nothing of a device; it proves that each of them runs, looks
at what it says, and can fail.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.fake_cuda.faulty import Fault
from tests.fake_cuda.log import faults, read_log
from tests.fake_cuda.spec import Spec
from tests.gpu import driver_stages, engine_stages, running, vmm
from tests.gpu.check import main
from tests.gpu.needs import MODULES
from tests.gpu.rig import CUDA, Failed, Rig, Stage
from tests.gpu.running import STAGES, why_not

from teacher_logits.device_memory import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
QUICK = {"own_handle", "event_order", "hand_over"}


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.check", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return Spec(folder=str(tmp_path))


@pytest.fixture
def rig_of() -> Callable[[Spec], Rig]:
    def make(spec: Spec) -> Rig:
        rig = Rig.of(spec.dumps(), ordinal=0, other_pythons=())
        assert rig is not None
        return rig

    return make


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_passes_on_a_gpu() -> None:
    if why := why_not(CUDA, 0):
        pytest.skip(why)

    done = check()

    assert done.returncode == 0, done.stdout


def test_says_so_where_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "4711"]) == 2

    said = capsys.readouterr()
    assert "there is no CUDA device 4711 here" in said.err
    assert said.out == ""


def test_says_so_where_a_driver_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(driver: str) -> None:
        raise DeviceError("cuInit: 999", number=999, name="UNKNOWN", call="cuInit")

    monkeypatch.setattr("tests.gpu.running.memory_of", fail)

    assert main([]) == 2
    assert "cuInit: 999" in capsys.readouterr().err


def test_names_what_the_interpreter_lacks_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("crc32c", "grpc_health.v1"):
        monkeypatch.setitem(sys.modules, module, None)

    assert main(["--only", "of_tomorrow"]) == 2
    said = capsys.readouterr().err
    assert "lacks grpcio-health-checking, crc32c" in said
    assert "pip download" in said
    assert "of_tomorrow" not in said


def test_looks_for_all_that_the_project_needs() -> None:
    declared = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2]
    names = re.findall(r'^    "([a-z0-9-]+)[><=]', declared.partition("]")[0], re.MULTILINE)
    assert sorted(names) == sorted(MODULES.values())


def test_knows_its_stages(capsys: pytest.CaptureFixture[str], spec: Spec) -> None:
    assert main(["--driver", spec.dumps(), "--only", "raw_ipc,of_tomorrow"]) == 2
    assert "no stage of_tomorrow" in capsys.readouterr().err


def test_reports_each_stage_and_goes_on_behind_one_that_fails(spec: Spec) -> None:
    broken = replace(spec, faults=(Fault(call="allocate", error=999),))

    done = check("--driver", broken.dumps(), "--only", "own_handle,torch_versions")

    report = json.loads(done.stdout)
    stages = report["stages"]
    assert done.returncode == 1
    assert report["result"] == "failed"
    assert "fake" in report["driver"]
    assert stages["own_handle"]["result"] == "failed"
    assert "999" in stages["own_handle"]["why"]
    assert stages["torch_versions"]["result"] == "skipped"
    assert "--other-python" in stages["torch_versions"]["why"]


def test_does_not_pass_where_no_time_was_left_for_a_stage(
    spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--driver", spec.dumps(), "--only", "cycles", "--seconds", "1"]) == 1

    report = json.loads(capsys.readouterr().out)
    assert report["result"] == report["stages"]["cycles"]["result"] == "failed"
    assert "--seconds" in report["stages"]["cycles"]["why"]


def test_says_what_a_stage_left_out_and_does_not_pass_with_it(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = {
        "own_handle": {"result": "ok", "numbers": {}},
        "cycles": {"result": "ok", "numbers": {}, "left_out": ["600 of 1020 cycles"]},
        "sessions": {"result": "skipped", "why": "no such thing here"},
    }
    monkeypatch.setattr(running, "_run", lambda stage, *_: reports[stage.name])
    assert main(["--driver", spec.dumps(), "--only", ",".join(reports)]) == 1

    said = json.loads(capsys.readouterr().out)
    assert said["result"] == "incomplete"
    assert said["left_out"] == {"cycles": ["600 of 1020 cycles"]}
    assert said["budget_seconds"] == running.SECONDS


def test_a_stage_that_is_late_says_so_itself(
    spec: Spec, capsys: pytest.CaptureFixture[str]
) -> None:
    late = ["--stage", "raw_ipc", "--driver", spec.dumps(), f"--until={time.monotonic()}"]
    assert main(late) == 0

    *places, report = capsys.readouterr().out.splitlines()
    assert places == ["at sizes 1 of 2"]
    assert json.loads(report)["result"] == "ok"
    assert json.loads(report)["left_out"] == ["1 of 2 sizes"]


def test_a_stage_that_is_ended_is_said_to_have_been_at_its_last_part() -> None:
    assert running._place("at cycles 1 of 9\nat cycles 2 of 9\n").endswith("at cycles 2 of 9")
    assert running._place("") == ""


def test_a_stage_that_cannot_be_ended_is_not_waited_for() -> None:
    """Here a child in a group of its own has its pipe; on a GPU it may hang in the kernel."""
    script = "echo at sizes 2 of 9; setsid sh -c 'echo $$; exec sleep 600' & wait"
    process = subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    child = int([process.stdout.readline() for _ in range(2)][1])
    try:
        os.killpg(process.pid, signal.SIGKILL)
        assert running.last_words(process, within=0.1) == ""
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, id=stage.name, marks=() if stage.name in QUICK else pytest.mark.slow)
        for stage in STAGES
        if stage.on_fake and stage.name != "torch_versions"
    ],
)
def test_runs_over_the_fake_and_does_nothing_undefined(
    spec: Spec, rig_of: Callable[[Spec], Rig], stage: Stage
) -> None:
    assert stage.run(rig_of(spec))
    assert faults(read_log(Path(spec.folder))) == []


def test_asks_for_virtual_memory_with_structures_of_the_drivers_sizes() -> None:
    assert ctypes.sizeof(vmm.Properties) == 32
    assert ctypes.sizeof(vmm.Access) == 12


class TestAStageFails:
    def test_where_a_driver_opens_its_own_handle(
        self, spec: Spec, rig_of: Callable[[Spec], Rig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = rig_of(spec)
        monkeypatch.setattr(rig.memory, "open", lambda handle, *, device: 4096)

        with pytest.raises(Failed, match="its own process"):
            driver_stages.own_handle(rig)

    @pytest.mark.parametrize(
        ("student", "said"),
        [
            ("device", {"transport": "shared_memory", "device": "cpu", "is_pinned": False}),
            ("device", {"transport": "cuda_ipc", "device": "cuda:1", "is_pinned": False}),
            ("pinned", {"transport": "shared_memory", "device": "cpu", "is_pinned": True}),
        ],
    )
    def test_where_scores_lie_elsewhere_than_they_should(
        self, spec: Spec, rig_of: Callable[[Spec], Rig], student: str, said: dict[str, object]
    ) -> None:
        with pytest.raises(Failed, match=student):
            engine_stages._check_place(rig_of(spec), student, said)

    def test_where_other_bytes_are_read(
        self, spec: Spec, rig_of: Callable[[Spec], Rig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver_stages, "OFFSET_BYTES", 0)
        monkeypatch.setattr(driver_stages, "fill", lambda words, *, seed: words.fill_(seed))

        with pytest.raises(Failed, match="behind the event"):
            driver_stages.event_order(rig_of(spec))
