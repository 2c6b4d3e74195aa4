"""The GPU check at work: its stages, each in a process of its own, and the report of them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone

import torch
from tests.gpu import driver_stages, engine_stages, lifetime_stages, service_stages, vmm
from tests.gpu.rig import CUDA, ROOT, Failed, Numbers, Rig, Skipped, Stage, memory_of

from teacher_logits.device_memory import DeviceError

STAGES = (
    Stage(run=driver_stages.probe, budget_seconds=30),
    Stage(run=driver_stages.raw_ipc, budget_seconds=60),
    Stage(run=driver_stages.own_handle, budget_seconds=30),
    Stage(run=driver_stages.stale_handle, budget_seconds=40),
    Stage(run=driver_stages.other_pid_namespace, budget_seconds=40),
    Stage(run=driver_stages.event_order, budget_seconds=40),
    Stage(run=driver_stages.allocators, budget_seconds=60),
    Stage(run=driver_stages.bandwidth, budget_seconds=40),
    Stage(run=vmm.vmm_by_descriptor, budget_seconds=40, on_fake=False),
    Stage(run=service_stages.hand_over, budget_seconds=100),
    Stage(run=service_stages.several_students, budget_seconds=60),
    Stage(run=service_stages.late_kernel, budget_seconds=60, on_fake=False),
    Stage(run=service_stages.cuda_logits, budget_seconds=40),
    Stage(run=service_stages.own_buffer, budget_seconds=40),
    Stage(run=service_stages.registration, budget_seconds=60, on_fake=False),
    Stage(run=service_stages.host_copies, budget_seconds=50),
    Stage(run=service_stages.pinned, budget_seconds=60, on_fake=False),
    Stage(run=engine_stages.engine, budget_seconds=90),
    Stage(run=service_stages.torch_versions, budget_seconds=60),
    Stage(run=lifetime_stages.student_killed, budget_seconds=60),
    Stage(run=lifetime_stages.server_killed, budget_seconds=60),
    Stage(run=lifetime_stages.cycles, budget_seconds=60),
    Stage(run=lifetime_stages.sessions, budget_seconds=50),
)
LEAST_SECONDS = 5.0
"""What a stage needs at least, for its imports alone."""

NO_GPU = (
    "gpu-check: there is no CUDA device {ordinal} here: {why}. The check is for a machine with an "
    "NVIDIA GPU; `make test` runs it over the fake driver everywhere.\n"
)


def main(argv: list[str], *, description: str | None = None) -> int:
    """Run what the command line asks for."""
    options = _parser(description).parse_args(argv)
    if options.stage:
        return _run_here(options)
    why = why_not(options.driver, options.device)
    if why:
        sys.stderr.write(NO_GPU.format(ordinal=options.device, why=why))
        return 2
    wanted = options.only.split(",") if options.only else [stage.name for stage in STAGES]
    unknown = set(wanted) - {stage.name for stage in STAGES}
    if unknown:
        sys.stderr.write(f"gpu-check: there is no stage {', '.join(sorted(unknown))}\n")
        return 2
    started = time.monotonic()
    is_real = options.driver == CUDA
    until = started + options.seconds
    reports = {stage.name: _run(stage, argv, until) for stage in STAGES if stage.name in wanted}
    failed = [name for name, report in reports.items() if report["result"] == "failed"]
    report = {
        "check": "teacher-logits gpu-check",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "driver": "cuda" if is_real else "fake: proves nothing of a device",
        "result": "failed" if failed else "ok",
        "seconds": round(time.monotonic() - started, 1),
        "stages": reports,
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-check", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", type=int, default=0, help="the device's number")
    parser.add_argument("--only", default="", help="stages, with commas between")
    parser.add_argument("--seconds", type=float, default=480, help="for all stages together")
    parser.add_argument("--other-python", action="append", default=[], metavar="PATH")
    parser.add_argument("--driver", default=CUDA, help=argparse.SUPPRESS)
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    return parser


def why_not(driver: str, ordinal: int) -> str:
    """Say in a few words why there is nothing to check; makes no context."""
    try:
        memory = memory_of(driver)
    except DeviceError as error:
        return error.message
    if memory is None:
        return "no driver (libcuda.so.1) or no device was found"
    if ordinal >= len(memory.devices()):
        return f"the driver sees {len(memory.devices())} device(s)"
    if driver == CUDA and not torch.cuda.is_available():
        return f"torch {torch.__version__} has no CUDA"
    return ""


def _run(stage: Stage, argv: list[str], until: float) -> Numbers:
    """Run a stage in a process group of its own, which ends with it."""
    started = time.monotonic()
    seconds = min(stage.budget_seconds, until - started)
    if seconds < LEAST_SECONDS:
        return {"result": "failed", "why": "no time was left (--seconds)", "seconds": 0.0}
    sys.stderr.write(f"{stage.name} ...")
    sys.stderr.flush()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.check", *argv, "--stage", stage.name],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # many processes, few cores
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        report: Numbers = {"result": "failed", "why": f"not done in {seconds:.0f} s"}
    else:
        report = _report(out, err, process.returncode)
    report["seconds"] = round(time.monotonic() - started, 1)
    why = f": {report['why']}" if "why" in report else ""
    sys.stderr.write(f" {report['result']} ({report['seconds']} s){why}\n")
    return report


def _report(out: str, err: str, code: int) -> Numbers:
    lines = out.strip().splitlines()
    try:
        report: Numbers = json.loads(lines[-1])
    except (IndexError, ValueError):
        tail = err.strip().splitlines()[-5:]
        return {"result": "failed", "why": f"ended with {code}", "said": tail}
    return report


def _run_here(options: argparse.Namespace) -> int:
    """Run one stage in this process and print what came of it."""
    stage = next(stage for stage in STAGES if stage.name == options.stage)
    report: Numbers
    try:
        rig = Rig.of(
            options.driver, ordinal=options.device, other_pythons=tuple(options.other_python)
        )
        if rig is None:
            raise Failed("the device is gone")
        if rig.is_fake and not stage.on_fake:
            raise Skipped("the fake driver cannot carry it")
        report = {"result": "ok", "numbers": stage.run(rig)}
    except Skipped as skipped:
        report = {"result": "skipped", "why": str(skipped)}
    except Failed as failed:
        report = {"result": "failed", "why": str(failed), "numbers": failed.numbers}
    except DeviceError as error:
        report = {"result": "failed", "why": error.message, "numbers": error.facts}
    print(json.dumps(report))  # noqa: T201
    return 0
