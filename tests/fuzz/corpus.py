"""The corpus: inputs that once found something, or reach far, a file each in `corpus/SURFACE/`."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"


def corpus_of(name: str) -> list[bytes]:
    """Return what is kept of a surface."""
    return [path.read_bytes() for path in sorted((FOLDER / name).glob("*"))]
