"""What is installed, and what is seen of GPUs and their driver without starting it."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

import torch

from teacher_logits.cuda_memory import by_ctypes as cuda_ctypes
from teacher_logits_client.doctor.findings import Finding, Verdict

REQUIRED = ("teacher-logits", "torch", "grpcio", "protobuf", "crc32c")
ENGINE = ("transformers", "accelerate", "gguf", "safetensors")
_OLDEST_PYTHON = (3, 10)
_GPUS = "/proc/driver/nvidia/gpus"


def software_findings() -> list[Finding]:
    """Look at Python, the distributions that the service stands on, and CUDA."""
    return [
        python_finding(sys.version_info[:3]),
        *version_findings(),
        cuda_finding(gpus_in(_GPUS), has_library=cuda_ctypes.load() is not None),
    ]


def python_finding(version: tuple[int, ...]) -> Finding:
    """Judge a version of Python."""
    text = ".".join(map(str, version))
    is_old = version < _OLDEST_PYTHON
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    return Finding(
        name="python",
        verdict=Verdict.FAIL if is_old else Verdict.OK,
        message=f"{platform.python_implementation()} {text}",
        cure=f"use Python {oldest} or newer" if is_old else "",
        facts={"version": text},
    )


def version_findings() -> list[Finding]:
    """Say which releases are here: what everything needs, and what the built-in engine needs."""
    required, missing = _versions(REQUIRED)
    engine, engine_missing = _versions(ENGINE)
    return [
        Finding(
            name="packages",
            verdict=Verdict.FAIL if missing else Verdict.OK,
            message=_listed(required, missing),
            cure="install them: pip install teacher-logits" if missing else "",
            facts={**required},
        ),
        Finding(
            name="engine_packages",
            verdict=Verdict.WARN if engine_missing else Verdict.OK,
            message=f"for the built-in engine: {_listed(engine, engine_missing)}",
            cure="to serve a model here: pip install 'teacher-logits[transformers]'"
            if engine_missing
            else "",
            facts={**engine},
        ),
    ]


def gpus_in(folder: str) -> tuple[str, ...]:
    """Return the models of the GPUs that the kernel driver lists in a folder, a file each."""
    names = []
    for path in sorted(Path(folder).glob("*/information")):
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
        names.append(fields.get("Model", "a GPU of no name"))
    return tuple(names)


def cuda_finding(gpus: tuple[str, ...], *, has_library: bool) -> Finding:
    """Say which GPUs are seen, and whether the library is here by which payloads lie on them."""
    seen = f"the kernel driver sees {', '.join(gpus)}" if gpus else "no GPU in /proc/driver/nvidia"
    library = f"{'' if has_library else 'no '}{cuda_ctypes.LIBRARY}"
    if gpus and has_library:
        means = "payloads can be passed in device memory (cuda_ipc, proven on a fake driver only)"
    else:
        means = "payloads come in host memory; passing them in device memory (cuda_ipc) needs both"
    return Finding(
        name="cuda",
        verdict=Verdict.OK,
        message=f"{seen}, {library}: {means}; no driver was started to look",
        facts={
            "device_count": len(gpus),
            "driver_library": has_library,
            "torch_cuda": torch.version.cuda or "",
        },
    )


def _versions(names: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Return the version of each distribution that is installed, and those that are not."""
    found: dict[str, str] = {}
    missing = []
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return found, missing


def _listed(found: dict[str, str], missing: list[str]) -> str:
    there = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"{there}; missing: {', '.join(missing)}" if missing else there
