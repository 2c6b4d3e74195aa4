"""What is installed: Python, and the distributions that the service and its engine stand on."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from teacher_logits_client.doctor.findings import Finding, Verdict

REQUIRED = ("teacher-logits", "torch", "grpcio", "protobuf", "crc32c")
ENGINE = ("transformers", "accelerate", "gguf", "safetensors")
_OLDEST_PYTHON = (3, 10)


def software_findings() -> list[Finding]:
    """Look at Python, and the distributions that the service stands on."""
    return [python_finding(sys.version_info[:3]), *version_findings()]


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
