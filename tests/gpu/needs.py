"""What the check needs of its interpreter, looked for before anything of it is imported.

A machine that is lent out often has torch with CUDA and little else. What is missing there is named
by what pip calls it, so that one ``pip download`` on another machine brings all of it.
"""

from __future__ import annotations

import importlib
import sys

MODULES = {
    "torch": "torch",
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "google.rpc.status_pb2": "googleapis-common-protos",
    "grpc_health.v1": "grpcio-health-checking",
    "crc32c": "crc32c",
    "yaml": "pyyaml",
    "prometheus_client": "prometheus-client",
    "typing_extensions": "typing-extensions",
}
"""What is imported, and the distribution that has it: those that pyproject.toml names."""


def missing() -> dict[str, str]:
    """Return the distributions that this interpreter lacks, each with why it cannot be used."""
    found = {}
    for module, distribution in MODULES.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # a wheel of another Python fails in ways of its own
            found[distribution] = f"{type(error).__name__}: {error}"
    return found


def sentence(lacking: dict[str, str]) -> str:
    """Say what is missing and how it is brought here."""
    names = " ".join(lacking)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    why = "".join(f"  {name}: {reason}\n" for name, reason in lacking.items())
    return (
        f"gpu-check: {sys.executable} (Python {python}) lacks {', '.join(lacking)}:\n{why}"
        f"Install them: pip install {names}. Without a network here, on a machine that has one:\n"
        f"  pip download --no-deps --only-binary=:all: --python-version {python} "
        f"--platform manylinux2014_x86_64 -d wheels {names}\n"
        "then here: pip install --no-index --no-deps --target site wheels/*.whl, and "
        "PYTHONPATH=site make gpu-check PY=python3 (docs/gpu.md).\n"
    )
