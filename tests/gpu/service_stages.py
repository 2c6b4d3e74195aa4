"""Stages that go through the service: what students get, how, and what it costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import torch
from tests.gpu.driver_stages import allocator_environment, keep_busy
from tests.gpu.rig import MIB, ROOT, Failed, Numbers, Rig, Skipped
from tests.gpu.service_rig import PATIENCE_SECONDS, check_step, join, publish, service
from tests.gpu.student import IN_HAND, digest
from tests.gpu.teacher import ROWS, TOP_K, VOCABULARY, profile_of, tokens_of, write

import teacher_logits_client as tl


def hand_over(rig: Rig) -> Numbers:
    """The hand-over costs the same for the small size and the large one."""
    sizes = {"small": rig.small_bytes, "large": rig.large_bytes}
    taken: dict[str, list[float]] = {name: [] for name in sizes}
    numbers: Numbers = {}
    with service(rig) as here:
        publishers = {name: here.publisher(name, size) for name, size in sizes.items()}
        student = here.student()
        for name, size in sizes.items():
            join(student, name)
            written = publish(publishers[name], 0, size)
            said = student.ask("acquire", teacher=name, step=0, look=True)
            check_step(said, rig)
            student.ask("close", teacher=name)
            numbers[name] = {"size_bytes": written, "first_us": said["us"]}
        for step in rig.clock.through(range(1, rig.rounds + 1), what="rounds"):
            for name, size in sizes.items():
                publish(publishers[name], step, size)
                said = student.ask("acquire", teacher=name, step=step, look=step == rig.rounds)
                check_step(said, rig)
                student.ask("close", teacher=name)
                taken[name].append(float(str(said["us"])))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, values in taken.items():
        about = numbers[name]
        assert isinstance(about, dict)
        about.update(median_us=medians[name], min_us=min(values), max_us=max(values))
    numbers["ratio"] = round(medians["large"] / medians["small"], 2)
    if not rig.is_fake and medians["large"] > 1.25 * medians["small"] + 100:
        raise Failed("the hand-over of the large size costs more", **numbers)
    return numbers


def several_students(rig: Rig) -> Numbers:
    """Three students read the same large step at once; its room is used again after the last."""
    size = rig.large_bytes // 4
    with service(rig) as here:
        publisher = here.publisher("several", size)
        students = [here.student() for _ in range(3)]
        for student in students:
            join(student, "several")
        written = steps = 0
        for step in rig.clock.through(range(5), what="steps"):
            written = publish(publisher, step, size)
            for student in students:
                student.start("acquire", teacher="several", step=step, look=True)
            for student in students:
                check_step(student.answer(), rig)
            for student in students:
                student.ask("close", teacher="several")
            steps += 1
    return {"size_bytes": written, "students": len(students), "steps": steps}


def late_kernel(rig: Rig) -> Numbers:
    """A seal right behind a long kernel: readers see what it wrote, and nobody slept (T07)."""
    size = rig.large_bytes // 16
    sealed: list[float] = []
    about: Numbers = {}
    with service(rig) as here:
        publisher = here.publisher("late", size)
        student = here.student()
        join(student, "late")
        for step in rig.clock.through(range(10), what="steps"):
            with publisher.reserve(step, lengths=[tokens_of(size)] * ROWS) as draft:
                about = keep_busy(rig)
                write(draft, step)
                started = time.perf_counter()
            sealed.append((time.perf_counter() - started) * 1e3)
            check_step(student.ask("acquire", teacher="late", step=step, look=True), rig)
            student.ask("close", teacher="late")
    return {"steps": len(sealed), "seal_ms": round(statistics.median(sealed), 1), **about}


def cuda_logits(rig: Rig) -> Numbers:
    """Logits on the device go straight into the slab; the student has the same bits."""
    tokens = 64
    torch.manual_seed(11)
    on_host = torch.randn(ROWS * tokens, VOCABULARY)
    logits = on_host.to(rig.torch_device)
    with service(rig) as here:
        publisher = here.publisher("logits", ROWS * tokens * 8192)
        student = here.student()
        join(student, "logits")
        ids = torch.randint(0, VOCABULARY, (ROWS, tokens))
        with publisher.reserve(0, input_ids=ids) as draft:
            tl.select_top_k(logits, out=draft)
            columns = draft.columns
            own = {name: digest(columns[name]) for name in IN_HAND}
            place = str(columns["topk_ids"].device)
        student.ask("acquire", teacher="logits", step=0)
        theirs = student.ask("digests", teacher="logits")
        student.ask("close", teacher="logits")
    numbers: Numbers = {"device": place, "positions": ROWS * tokens, "digests": own}
    if theirs != own:
        raise Failed("the student has other bits than the draft", theirs=theirs, **numbers)
    return numbers


def own_buffer(rig: Rig) -> Numbers:
    """A buffer of the publisher's own is registered once and read by offsets; the server opens
    nothing (T18)."""
    size = rig.small_bytes * 4
    tokens = tokens_of(rig.small_bytes)
    storage = _storage(rig, size)
    numbers: Numbers = {"server_had_driver": None}
    with service(rig) as here:
        publisher = here.publisher("own", rig.small_bytes)
        student = here.student()
        join(student, "own")
        buffer = publisher.register(storage)
        for step in rig.clock.through(range(3), what="steps"):
            buffer.wait_free(timeout=PATIENCE_SECONDS)
            columns = _views(storage, tokens * ROWS)
            with publisher.reserve(step, lengths=[tokens] * ROWS, columns=columns) as draft:
                write(draft, step)
            check_step(student.ask("acquire", teacher="own", step=step, look=True), rig)
            student.ask("close", teacher="own")
        buffer.close(timeout=PATIENCE_SECONDS)
        numbers["server_had_driver"] = here.server.has_driver()
    if numbers["server_had_driver"]:
        raise Failed("the server has the driver loaded: it is to hand handles on", **numbers)
    return numbers


def _storage(rig: Rig, size_bytes: int) -> torch.Tensor:
    if not rig.is_fake:
        return torch.empty(size_bytes, dtype=torch.uint8, device=rig.torch_device)
    address = rig.memory.allocate(size_bytes, device=rig.device)
    return rig.words(address, size_bytes).view(torch.uint8)


def _views(storage: torch.Tensor, positions: int) -> dict[str, torch.Tensor]:
    """Lay columns into a buffer, each at a multiple of 256 bytes."""
    wanted = {
        "topk_ids": (torch.int32, (positions, TOP_K)),
        "topk_logprobs": (torch.float16, (positions, TOP_K)),
        "log_tail": (torch.float32, (positions, 1)),
        "logsumexp": (torch.float32, (positions, 1)),
        "actual_logprob": (torch.float32, (positions,)),
    }
    views = {}
    at = 0
    promised = {kind.value for kind in profile_of("own", 2).columns}
    for name, (dtype, shape) in wanted.items():
        if name not in promised:
            continue
        count = torch.Size(shape).numel() * dtype.itemsize
        views[name] = storage[at : at + count].view(dtype).view(shape)
        at = -(-(at + count) // 256) * 256
    return views


def registration(rig: Rig) -> Numbers:
    """Registering memory that nobody could open is refused, and names the setting (R38, T14)."""
    found: Numbers = {}
    with service(rig) as here:
        settings = (
            ("expandable", "backend:native,expandable_segments:True"),
            ("pool", "backend:cudaMallocAsync"),
        )
        for name, setting in rig.clock.through(settings, what="allocators"):
            command = [sys.executable, "-m", "tests.gpu.registrant", rig.driver]
            done = subprocess.run(
                [*command, str(rig.device.ordinal), here.server.address, name],
                cwd=ROOT,
                env=allocator_environment(setting),
                capture_output=True,
                text=True,
                timeout=100,
            )
            said = (done.stdout.strip() or done.stderr.strip()).splitlines()
            found[name] = said[-1] if said else f"ended with {done.returncode}"
    for name, said_last in found.items():
        if not str(said_last).startswith(("refused: ", "torch has no")):
            raise Failed(f"memory of {name} was not refused", **found)
    return found


def host_copies(rig: Rig) -> Numbers:
    """A student that cannot read the device has the same steps by host copies."""
    size = rig.small_bytes
    numbers: Numbers = {}
    with service(rig) as here:
        publisher = here.publisher("copies", size)
        near, far = here.student(), here.student()
        join(near, "copies")
        numbers["settled"] = far.ask("open", teacher="copies", transports="shared_memory,stream")
        for step in rig.clock.through(range(3), what="steps"):
            publish(publisher, step, size)
            check_step(near.ask("acquire", teacher="copies", step=step, look=True), rig)
            said = far.ask("acquire", teacher="copies", step=step, look=True)
            if said.get("wrong") or said["device"] != "cpu":
                raise Failed("the host copy is not the step", **said)
            for student in (near, far):
                student.ask("close", teacher="copies")
    return numbers


def pinned(rig: Rig) -> Numbers:
    """Host memory that is pinned where it lies goes to the device without a staging copy."""
    size = min(rig.large_bytes, 512 * MIB)
    rates: Numbers = {}
    with service(rig) as here:
        publisher = here.publisher("pinned", size, on_device=False)
        for mode in rig.clock.through(("pinned", "read_only"), what="modes"):
            student = here.student()
            student.ask("open", teacher="pinned", transports="shared_memory", mode=mode)
            step = len(rates)
            publish(publisher, step, size)
            student.ask("acquire", teacher="pinned", step=step)
            rates[mode] = student.ask("to_device", teacher="pinned", rounds=rig.rounds)
            student.ask("close", teacher="pinned")
            student.ask("leave", teacher="pinned")
    return rates


def torch_versions(rig: Rig) -> Numbers:
    """A student of another torch release reads the same (T16)."""
    if not rig.other_pythons:
        raise Skipped("give --other-python PATH of an interpreter with another torch release")
    size = rig.small_bytes
    numbers: Numbers = {"here": torch.__version__}
    with service(rig) as here:
        publisher = here.publisher("versions", size)
        pythons = rig.clock.through(rig.other_pythons, what="interpreters")
        for step, python in enumerate(pythons):
            student = here.student(python)
            numbers[python] = student.ask("about")
            join(student, "versions")
            publish(publisher, step, size)
            check_step(student.ask("acquire", teacher="versions", step=step, look=True), rig)
            student.ask("close", teacher="versions")
            student.ask("leave", teacher="versions")
    return numbers
