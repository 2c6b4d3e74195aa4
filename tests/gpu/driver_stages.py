"""Stages that ask the driver alone: what CUDA promises, seen on this machine.

What the fake driver enforces by reading (``tests.fake_cuda.driver``) is measured here.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time

import torch
from tests.gpu.peer import as_json, fill
from tests.gpu.rig import CUDA, GIB, ROOT, Failed, Numbers, Peer, Rig, Skipped, pid_namespace

from teacher_logits.device_memory import DeviceError, MemoryKind

MODULE = "tests.gpu.peer"
OFFSET_BYTES = 512
"""The exported memory starts inside its allocation, so that base and offset are told apart."""


def probe(rig: Rig) -> Numbers:
    """Who is here: driver, devices, torch, kernel."""
    return {
        "source": getattr(rig.memory, "source", "the fake driver"),
        "devices": [
            {"uuid": each.uuid, "name": each.name, "is_mig": each.is_mig}
            for each in rig.memory.devices()
        ],
        "device": rig.device.ordinal,
        "torch": torch.__version__,
        "cuda_runtime": torch.version.cuda or "none",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "pid_namespace": pid_namespace(),
        "free_bytes": rig.free_bytes(),
        "large_bytes": rig.large_bytes,
    }


def raw_ipc(rig: Rig) -> Numbers:
    """A handle between two processes: the data, and what opening costs by size and by repeat."""
    numbers: Numbers = {}
    first: dict[str, float] = {}
    with rig.peer(MODULE) as writer, rig.peer(MODULE) as reader:
        sizes = (("small", rig.small_bytes), ("large", rig.large_bytes))
        for name, size in rig.clock.through(sizes, what="sizes"):
            reader.ask("warm_up")
            made = writer.ask("make", size_bytes=size, seed=7, offset_bytes=OFFSET_BYTES)
            if made["base_offset_bytes"] != OFFSET_BYTES:
                raise Failed(f"exported at {OFFSET_BYTES}, the driver says {made}")
            opened = reader.ask("open", handle=made["handle"])
            again = [reader.ask("open", handle=made["handle"]) for _ in range(rig.rounds)]
            if {each["base"] for each in again} != {opened["base"]}:
                raise Failed("a handle that was opened again has another address")
            if _number(opened, "allocation_bytes") < OFFSET_BYTES + size:
                raise Failed("the reader's driver knows less of the allocation", **opened)
            address = _number(opened, "base") + OFFSET_BYTES
            seen = reader.ask("check", address=address, size_bytes=size, seed=7)
            if seen["wrong_words"]:
                raise Failed(f"{seen['wrong_words']} words of {size} bytes differ", **seen)
            closes = [reader.ask("close", base=opened["base"]) for _ in range(len(again) + 1)]
            first[name] = _number(opened, "us")
            numbers[name] = {
                "size_bytes": size,
                "first_open_us": opened["us"],
                "cached_open_us": statistics.median(_number(each, "us") for each in again),
                "last_close_us": closes[-1]["us"],
                "digest_of_first_mib": seen["digest_of_first_mib"],
                "kind": opened["kind"],
            }
            writer.ask("free", base=made["base"])
    if len(first) == len(sizes):
        numbers["first_open_ratio"] = round(first["large"] / first["small"], 2)
    return numbers


def own_handle(rig: Rig) -> Numbers:
    """A process cannot open a handle of its own."""
    base = rig.memory.allocate(rig.small_bytes, device=rig.device)
    exported = rig.memory.export(base)
    try:
        rig.memory.open(exported.handle, device=rig.device)
    except DeviceError as error:
        return {"refused": error.number, "name": error.name}
    finally:
        rig.memory.free(base, device=rig.device)
    raise Failed("the driver opened a handle of its own process; the fake refuses with 201")


def stale_handle(rig: Rig) -> Numbers:
    """A handle of memory that was freed opens nothing, or nothing of what is there now."""
    with rig.peer(MODULE) as writer, rig.peer(MODULE) as reader:
        old = writer.ask("make", size_bytes=rig.small_bytes, seed=1)
        writer.ask("free", base=old["base"])
        new = writer.ask("make", size_bytes=rig.small_bytes, seed=2)
        said = reader.ask("open", handle=old["handle"])
        numbers: Numbers = {
            "same_address": old["base"] == new["base"],
            "same_handle": old["handle"] == new["handle"],
            "refused": said.get("refused", 0),
        }
        if "base" in said and old["handle"] != new["handle"]:
            raise Failed("a stale handle was opened", **numbers)
        return numbers


def other_pid_namespace(rig: Rig) -> Numbers:
    """A handle does not reach a process of another PID namespace: with which number."""
    inside = [sys.executable, "-m", MODULE, rig.driver, str(rig.device.ordinal)]
    wrapped = ["unshare", "--pid", "--fork", "--mount-proc", *inside]
    try:
        tried = subprocess.run([*wrapped[:4], "true"], capture_output=True, timeout=20)
    except FileNotFoundError:
        raise Skipped("there is no unshare (util-linux) here") from None
    if tried.returncode:
        raise Skipped(f"unshare --pid is not allowed here: {tried.stderr.decode().strip()}")
    with rig.peer(MODULE) as writer:
        made = writer.ask("make", size_bytes=rig.small_bytes, seed=3)
        reader = Peer(wrapped)
        try:
            there = reader.ask("hello")["pid_namespace"]
            said = reader.ask("open", handle=made["handle"])
        finally:
            reader.end()
    numbers: Numbers = {"here": pid_namespace(), "there": there, **said}
    if "refused" not in said:
        numbers["note"] = "the driver opened it: proofs decide, and this driver allows it"
    return numbers


def event_order(rig: Rig) -> Numbers:
    """An event lies behind a long kernel, and nothing is handed over before it (T07)."""
    size = rig.large_bytes // 4
    base = rig.memory.allocate(size, device=rig.device)
    words = rig.words(base, size)
    fill(words, seed=1)
    rig.memory.synchronise(device=rig.device)
    with rig.peer(MODULE) as reader:
        opened = reader.ask("open", handle=as_json(rig.memory.export(base))["handle"])
        busy_until = keep_busy(rig)
        give(rig, lambda: fill(words, seed=2))
        event = rig.memory.record(device=rig.device)
        was_past = event.is_past()
        started = time.perf_counter()
        event.wait()
        waited = time.perf_counter() - started
        seen = reader.ask("check", address=opened["base"], size_bytes=size, seed=2)
        reader.ask("close", base=opened["base"])
    rig.memory.free(base, device=rig.device)
    numbers: Numbers = {"waited_ms": round(waited * 1e3, 2), "was_past": was_past, **busy_until}
    if seen["wrong_words"]:
        raise Failed("what was behind the event was not there", **seen, **numbers)
    if was_past:
        raise Failed("the kernel was no long one: nothing was shown", **numbers)
    return numbers


def allocators(rig: Rig) -> Numbers:
    """Memory that cannot be exported is known for what it is (R38, T14)."""
    wanted = {
        "native": (MemoryKind.PLAIN, "backend:native"),
        "expandable": (MemoryKind.VIRTUAL, "backend:native,expandable_segments:True"),
        "pool": (MemoryKind.POOL, "backend:cudaMallocAsync"),
    }
    found: Numbers = {}
    wrong = []
    for name, (kind, setting) in rig.clock.through(wanted.items(), what="allocators"):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.gpu.allocator",
                rig.driver,
                str(rig.device.ordinal),
                name,
            ],
            cwd=ROOT,
            env=allocator_environment(setting),
            capture_output=True,
            text=True,
            timeout=120,
        )
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()
        found[name] = said[-1] if said else f"ended with {done.returncode}"
        if not str(found[name]).startswith((kind.name, "torch has no")):
            wrong.append(name)
    if wrong:
        raise Failed(f"told wrongly: {', '.join(wrong)}", **found)
    return found


def allocator_environment(setting: str) -> dict[str, str]:
    """Return an environment in which torch's allocator has a setting, under both of its names."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return {**os.environ, **dict.fromkeys(names, setting)}


def bandwidth(rig: Rig) -> Numbers:
    """Reading what was opened is as quick as reading one's own memory: at least 95 %."""
    size = min(rig.large_bytes, 2 * GIB)
    with rig.peer(MODULE) as writer, rig.peer(MODULE) as reader:
        made = writer.ask("make", size_bytes=size, seed=5)
        opened = reader.ask("open", handle=made["handle"])
        rates = reader.ask("bandwidth", address=opened["base"], size_bytes=size, rounds=rig.rounds)
        reader.ask("close", base=opened["base"])
    ratio = _number(rates, "opened_gb_s") / _number(rates, "local_gb_s")
    numbers: Numbers = {"size_bytes": size, **rates, "ratio": round(ratio, 3)}
    if ratio < 0.95 and rig.driver == CUDA:
        raise Failed("reading over IPC is slower than 95 % of a local read", **numbers)
    return numbers


def keep_busy(rig: Rig) -> Numbers:
    """Give the device work that lasts: about a quarter of a second of products of matrices."""
    if rig.is_fake:
        return {"kernel": "the fake's stream"}
    side = 8192
    one = torch.ones(side, side, device=rig.torch_device, dtype=torch.float16)
    out = torch.empty_like(one)
    torch.mm(one, one, out=out)
    torch.cuda.synchronize(rig.torch_device)
    started = time.perf_counter()
    torch.mm(one, one, out=out)
    torch.cuda.synchronize(rig.torch_device)
    each = time.perf_counter() - started
    count = max(4, min(2000, int(0.25 / max(each, 1e-6))))
    for _ in range(count):
        torch.mm(one, one, out=out)
    return {"kernel_ms": round(each * count * 1e3, 1)}


def give(rig: Rig, work: object) -> None:
    """Give the device something to do behind what it has: on the fake, to its stream."""
    assert callable(work)
    if rig.is_fake:
        rig.memory.enqueue(work, device=rig.device)  # type: ignore[attr-defined]
    else:
        work()


def _number(said: Numbers, name: str) -> float | int:
    value = said.get(name)
    if not isinstance(value, int | float):
        raise Failed(f"{name} is not in {said}")
    return value
