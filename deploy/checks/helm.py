"""Helm itself, as a library (helm-python-sdk): what it says of a chart, and what that renders.

It is asked in a process of its own. With the library comes Go's runtime, whose threads and
signal handlers would stay in whichever process has asked once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.checks import folder_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.checks.documents import Document

LIBRARY = Path(__file__).with_name("helm_library.py")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The resources that a chart makes of some values, or why it takes them not."""

    text: str
    refusal: str


@dataclass(frozen=True, kw_only=True)
class Told:
    """What its linter found; and where that is nothing, an answer for each set of values."""

    lint: tuple[str, ...]
    rendered: tuple[Rendered, ...]


def ask_helm(chart: Path, values: Sequence[Document]) -> Told:
    """Lint a chart, and render it with each set of values beside its own.

    Raises:
        ToolMissingError: the library is not here.
    """
    folder_of("helm_python", comes_from="helm-python-sdk (PyPI), which is built for few machines")
    asked = json.dumps({"chart": str(chart), "values": list(values)})
    done = subprocess.run(
        [sys.executable, str(LIBRARY)], input=asked, capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    return Told(
        lint=tuple(told["lint"]), rendered=tuple(Rendered(**each) for each in told["rendered"])
    )
