"""What stands in the way of payloads in device memory, seen without starting a driver.

What is looked at are files of the kernel driver, device nodes and settings; a trial open at the
handshake decides. Without a GPU nothing here is worse than ``ok``.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from teacher_logits.cuda_memory import by_ctypes as cuda_ctypes
from teacher_logits_client.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.errors import Fact

_VERSION = re.compile(r"Kernel Module.*?\s(\d+\.\d[\d.]*)")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
_ASYNC = re.compile(r"backend\s*:\s*cudaMallocAsync", re.IGNORECASE)
_NODE = re.compile(r"nvidia\d+\Z")


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """What is seen of GPUs: their models as the kernel driver lists them, and the way to them.

    ``nodes`` are devices in /dev, which a container may have fewer of than the driver lists.
    ``mig_instances`` are GPU instances that a MIG GPU was cut into.
    """

    models: tuple[str, ...] = ()
    driver_version: str = ""
    nodes: tuple[str, ...] = ()
    mig_instances: tuple[str, ...] = ()
    has_library: bool = False
    has_tool: bool = False


def look_at_gpus(proc: Path = Path("/proc/driver/nvidia"), dev: Path = Path("/dev")) -> Gpus:
    """Look at what the kernel driver shows; starts no driver and no program."""
    version = _VERSION.search(_text(proc / "version"))
    return Gpus(
        models=tuple(map(_model, sorted(proc.glob("gpus/*/information")))),
        driver_version=version[1] if version is not None else "",
        nodes=tuple(sorted(p.name for p in dev.glob("nvidia*") if _NODE.match(p.name))),
        mig_instances=tuple(
            sorted(f"{p.parts[-3]}/{p.name}" for p in proc.glob("capabilities/gpu*/mig/gi*"))
        ),
        has_library=cuda_ctypes.load() is not None,
        has_tool=shutil.which("nvidia-smi") is not None,
    )


def gpu_findings(
    gpus: Gpus, *, visible_devices: str, allocators: Sequence[tuple[str, str]]
) -> list[Finding]:
    """Judge what is seen; one finding a subject."""
    has_gpu = bool(gpus.models or gpus.nodes)
    return [
        cuda_finding(gpus),
        mig_finding(gpus, visible_devices=visible_devices),
        allocator_finding(allocators, has_gpu=has_gpu),
    ]


def cuda_finding(gpus: Gpus) -> Finding:
    """Judge whether the GPUs that the kernel driver has can be used by this process."""
    facts: dict[str, Fact] = {
        "device_count": len(gpus.models),
        "device_nodes": ",".join(gpus.nodes),
        "driver_version": gpus.driver_version,
        "driver_library": gpus.has_library,
        "nvidia_smi": gpus.has_tool,
        "torch_cuda": torch.version.cuda or "",
    }
    if not gpus.models and not gpus.nodes:
        library = f"{'' if gpus.has_library else 'no '}{cuda_ctypes.LIBRARY}"
        message = (
            f"no GPU in /proc/driver/nvidia, {library}: payloads come in host memory; no driver "
            "was started to look"
        )
        return Finding(name="cuda", verdict=Verdict.OK, message=message, facts=facts)
    listed = ", ".join(gpus.models) or "GPUs that it does not list"
    version = f" {gpus.driver_version}" if gpus.driver_version else ""
    seen = f"the kernel driver{version} sees {listed}"
    if not gpus.has_library:
        lack = f"{cuda_ctypes.LIBRARY} is not here, so payloads come in host memory"
        cure = "have the container's runtime bring the driver in (docker --gpus all, or the "
        cure += "NVIDIA device plugin, with NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    elif not gpus.nodes:
        lack = "none of them is in /dev, so payloads come in host memory"
        cure = "give the container its GPUs: docker --gpus all, or a limit of nvidia.com/gpu"
    else:
        few = len(gpus.nodes) < len(gpus.models)
        given = f"; {len(gpus.nodes)} of them are given to this container" if few else ""
        message = f"{seen}{given}; {cuda_ctypes.LIBRARY} is here: payloads can be passed in device "
        message += "memory (cuda_ipc, proven on a fake driver only); no driver was started to look"
        return Finding(name="cuda", verdict=Verdict.OK, message=message, facts=facts)
    message = f"{seen}, and {lack}"
    return Finding(name="cuda", verdict=Verdict.WARN, message=message, cure=cure, facts=facts)


def mig_finding(gpus: Gpus, *, visible_devices: str) -> Finding:
    """Judge whether a GPU is cut up: a part of one hands no memory over."""
    named = [each for each in visible_devices.split(",") if each.strip().startswith("MIG-")]
    facts: dict[str, Fact] = {"instances": ",".join(gpus.mig_instances), "visible": ",".join(named)}
    if not named and not gpus.mig_instances:
        return Finding(name="mig", verdict=Verdict.OK, message="no GPU is cut up", facts=facts)
    if named:
        what = f"CUDA_VISIBLE_DEVICES names {', '.join(named)}"
    else:
        what = f"the driver has the instances {', '.join(gpus.mig_instances)}"
    return Finding(
        name="mig",
        verdict=Verdict.WARN,
        message=f"{what}: a MIG device hands nothing over, and cuda_ipc is refused there (MIG); "
        "payloads come in host memory",
        cure="give teacher and student whole GPUs (nvidia-smi -mig 0), or serve without "
        "--device-pool-size",
        facts=facts,
    )


def allocator_finding(settings: Sequence[tuple[str, str]], *, has_gpu: bool) -> Finding:
    """Judge torch's allocator: of some of its memory no other process can open anything."""
    facts: dict[str, Fact] = dict(settings)
    bad = [
        (name, value)
        for name, value in settings
        if _EXPANDABLE.search(value) or _ASYNC.search(value)
    ]
    if not bad:
        given = ", ".join(f"{name}={value}" for name, value in settings) or "torch's own"
        message = f"settings of the device allocator: {given}"
        return Finding(name="allocator", verdict=Verdict.OK, message=message, facts=facts)
    name, value = bad[0]
    cure = f"{name}=expandable_segments:False"
    if _ASYNC.search(value):
        cure = f"leave backend:cudaMallocAsync out of {name}"
    return Finding(
        name="allocator",
        verdict=Verdict.WARN if has_gpu else Verdict.OK,
        message=f"{name}={value}: a publisher's own tensors there cannot be registered "
        "(publisher.register), since no other process can open that memory; slabs that are "
        "reserved lie elsewhere" + ("" if has_gpu else "; there is no GPU here"),
        cure=cure if has_gpu else "",
        facts=facts,
    )


def _model(path: Path) -> str:
    lines = _text(path).splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    return fields.get("Model", "a GPU of no name")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
