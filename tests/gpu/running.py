"""The GPU check at work: its stages, each in a process of its own, and the report of them."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import torch
from tests.gpu import driver_stages, engine_stages, lifetime_stages, service_stages, vmm
from tests.gpu.clock import LEAST_SECONDS, Clock, Limits, limits
from tests.gpu.rig import CUDA, ROOT, Failed, Numbers, Rig, Skipped, Stage, memory_of

from teacher_logits.device_memory import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable

STAGES = (
    Stage(run=driver_stages.probe, share=20),
    Stage(run=driver_stages.raw_ipc, share=26),
    Stage(run=driver_stages.own_handle, share=14),
    Stage(run=driver_stages.stale_handle, share=14),
    Stage(run=driver_stages.other_pid_namespace, share=14),
    Stage(run=driver_stages.event_order, share=14),
    Stage(run=driver_stages.allocators, share=26),
    Stage(run=driver_stages.bandwidth, share=18),
    Stage(run=vmm.vmm_by_descriptor, share=16, on_fake=False),
    Stage(run=service_stages.hand_over, share=52),
    Stage(run=service_stages.several_students, share=30),
    Stage(run=service_stages.late_kernel, share=24, on_fake=False),
    Stage(run=service_stages.cuda_logits, share=18),
    Stage(run=service_stages.own_buffer, share=20),
    Stage(run=service_stages.registration, share=28, on_fake=False),
    Stage(run=service_stages.host_copies, share=24),
    Stage(run=service_stages.pinned, share=28, on_fake=False),
    Stage(run=engine_stages.engine, share=40),
    Stage(run=service_stages.torch_versions, share=20),
    Stage(run=lifetime_stages.student_killed, share=28),
    Stage(run=lifetime_stages.server_killed, share=22),
    Stage(run=lifetime_stages.cycles, share=36),
    Stage(run=lifetime_stages.sessions, share=30),
)
SECONDS = 480.0
"""For all stages together, whatever becomes of each."""

LAST_WORDS_SECONDS = 2.0
"""How long a stage that was ended may take to be gone; nobody waits for it longer."""

_AT = "at "

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
    names = options.only.split(",") if options.only else [stage.name for stage in STAGES]
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        sys.stderr.write(f"gpu-check: there is no stage {', '.join(sorted(unknown))}\n")
        return 2
    started = time.monotonic()
    is_real = options.driver == CUDA
    wanted = [stage for stage in STAGES if stage.name in names]
    shares = [stage.share for stage in wanted]
    reports = {}
    for number, stage in enumerate(wanted):
        now = time.monotonic() - started
        reports[stage.name] = _run(
            stage, argv, limits(shares, number, seconds=options.seconds, now=now), started
        )
    result = _result(reports.values())
    report = {
        "check": "teacher-logits gpu-check",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "driver": "cuda" if is_real else "fake: proves nothing of a device",
        "result": result,
        "seconds": round(time.monotonic() - started, 1),
        "budget_seconds": options.seconds,
        "left_out": {
            name: each["left_out"] for name, each in reports.items() if "left_out" in each
        },
        "stages": reports,
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 0 if result == "ok" else 1


def _result(reports: Iterable[Numbers]) -> str:
    """Say what came of all: ``incomplete`` where nothing failed and something was left out."""
    every = list(reports)
    if any(each["result"] == "failed" for each in every):
        return "failed"
    return "incomplete" if any("left_out" in each for each in every) else "ok"


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-check", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", type=int, default=0, help="the device's number")
    parser.add_argument("--only", default="", help="stages, with commas between")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all stages together")
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
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


def _run(stage: Stage, argv: list[str], limit: Limits, begin: float) -> Numbers:
    """Run a stage in a process group of its own, which ends with it, or at its hard limit."""
    started = time.monotonic()
    seconds = begin + limit.hard - started
    if seconds < LEAST_SECONDS:
        return {"result": "failed", "why": "no time was left (--seconds)", "seconds": 0.0}
    sys.stderr.write(f"{stage.name} ...")
    sys.stderr.flush()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.gpu.check",
            *argv,
            "--stage",
            stage.name,
            f"--until={begin + limit.soft}",
        ],
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
        out = last_words(process)
        report: Numbers = {
            "result": "failed",
            "why": f"not done in {seconds:.0f} s of --seconds{_place(out)}",
        }
    else:
        report = _report(out, err, process.returncode)
    report["seconds"] = round(time.monotonic() - started, 1)
    why = f": {report['why']}" if "why" in report else ""
    sys.stderr.write(f" {report['result']} ({report['seconds']} s){why}\n")
    return report


def last_words(process: subprocess.Popen[str], *, within: float = LAST_WORDS_SECONDS) -> str:
    """Return what a killed process has said, although it may not end.

    Who hangs in a driver of the kernel's is not ended by any signal, and a descendant in a group of
    its own may have the pipe as well.
    """
    try:
        out, _ = process.communicate(timeout=within)
    except subprocess.TimeoutExpired as still:
        said = still.stdout or b""
        return said.decode(errors="replace") if isinstance(said, bytes) else said
    return out


def _place(out: str) -> str:
    """Say at which part a stage was that was ended."""
    lines = [line for line in out.splitlines() if line.startswith(_AT)]
    return f": it was at {lines[-1].removeprefix(_AT)}" if lines else ""


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
    clock = Clock(until=options.until, tell=_tell)
    try:
        rig = Rig.of(
            options.driver,
            ordinal=options.device,
            other_pythons=tuple(options.other_python),
            clock=clock,
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
    if clock.skipped:
        report["left_out"] = clock.skipped
    print(json.dumps(report))  # noqa: T201
    return 0


def _tell(where: str) -> None:
    print(f"{_AT}{where}", flush=True)  # noqa: T201
