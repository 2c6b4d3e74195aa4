"""Stages about ends: students and servers that die, and what is left after many cycles."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import torch
from tests.gpu.rig import MIB, Failed, Numbers, Peer, Rig
from tests.gpu.service_rig import STEPS_HELD, check_step, join, publish, service
from tests.stopping import stop

import teacher_logits_client as tl

if TYPE_CHECKING:
    from collections.abc import Mapping


def student_killed(rig: Rig) -> Numbers:
    """A student that is killed with a step in its hands gives its room back."""
    size = rig.small_bytes
    with service(rig) as here:
        publisher = here.publisher("killed", size)
        student = here.student()
        join(student, "killed")
        publish(publisher, 0, size)
        check_step(student.ask("acquire", teacher="killed", step=0, look=True), rig)
        stop(student.pid)
        publish(publisher, 1, size)  # its room is its own while it is stopped
        student.kill()
        started = time.perf_counter()
        other = here.student()
        join(other, "killed")
        for step in range(2, 2 + 3 * STEPS_HELD):
            publish(publisher, step, size)
            check_step(other.ask("acquire", teacher="killed", step=step, look=True), rig)
            other.ask("close", teacher="killed")
    return {"went_on_s": round(time.perf_counter() - started, 2)}


def server_killed(rig: Rig) -> Numbers:
    """When the server is killed, what a student holds stays right, and both sides are told."""
    size = rig.small_bytes
    before = rig.free_bytes()
    with service(rig) as here:
        publisher = here.publisher("orphan", size)
        student = here.student()
        join(student, "orphan")
        publish(publisher, 0, size)
        check_step(student.ask("acquire", teacher="orphan", step=0), rig)
        here.server.kill()
        wrong = student.ask("look", teacher="orphan", step=0)["wrong"]
        if wrong:
            raise Failed(f"{wrong} entries of a held step changed with the server's end")
        said = student.ask("fails", teacher="orphan", step=1)
        try:
            publish(publisher, 1, size)
        except tl.errors.TeacherLogitsError as error:
            told: Mapping[str, object] = {
                "publisher": type(error).__name__,
                "student": said["kind"],
            }
        else:
            raise Failed("a publisher without a server has published")
        student.kill()
    return {**told, "lost_bytes": max(0, before - rig.free_bytes()) if not rig.is_fake else 0}


def cycles(rig: Rig) -> Numbers:
    """Memory and descriptors after many cycles are what they were before, on both sides."""
    count, warm = (1000, 20) if not rig.is_fake else (30, 5)
    size = rig.small_bytes
    with service(rig) as here:
        publisher = here.publisher("cycles", size)
        student = here.student()
        join(student, "cycles")
        before: Numbers = {}
        started = time.perf_counter()
        done = 0
        for step in rig.clock.through(range(count + warm), what="cycles"):
            if step == warm:
                before = _held(rig, student)
            publish(publisher, step, size)
            student.ask("cycle", teacher="cycles", step=step)
            done += 1
        seconds = time.perf_counter() - started
        after = _held(rig, student)
    numbers: Numbers = {
        "cycles": max(0, done - warm),
        "us_a_cycle": round(seconds / done * 1e6),
        "before": before,
        "after": after,
    }
    _check_level(numbers, before, after)
    return numbers


def sessions(rig: Rig) -> Numbers:
    """Sessions that come and go leave no memory behind: as many closes as opens."""
    count = 30 if not rig.is_fake else 3
    size = rig.small_bytes
    with service(rig) as here:
        publisher = here.publisher("sessions", size)
        student = here.student()
        before: Numbers = {}
        done = 0
        for step in rig.clock.through(range(count + 2), what="sessions"):
            if step == 2:
                before = _held(rig, student)
            join(student, "sessions")
            publish(publisher, step, size)
            student.ask("cycle", teacher="sessions", step=step)
            student.ask("leave", teacher="sessions")
            done += 1
        after = _held(rig, student)
    numbers: Numbers = {"sessions": max(0, done - 2), "before": before, "after": after}
    _check_level(numbers, before, after)
    return numbers


def _check_level(numbers: Numbers, before: Numbers, after: Numbers) -> None:
    """Refuse what has grown, and what was never seen in between."""
    if not before:
        raise Failed("there was no time to see what grows", **numbers)
    for name, slack in (("descriptors", 4), ("student_descriptors", 4), ("used_bytes", 16 * MIB)):
        if float(str(after[name])) > float(str(before[name])) + slack:
            raise Failed(f"{name} grew", **numbers)


def _held(rig: Rig, student: Peer) -> Numbers:
    total = torch.cuda.mem_get_info(rig.device.ordinal)[1] if not rig.is_fake else 0
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "student_descriptors": student.ask("about")["descriptors"],
        "used_bytes": total - rig.free_bytes() if total else 0,
    }
