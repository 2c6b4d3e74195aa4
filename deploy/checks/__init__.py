"""What `make deploy-check` holds the files of `deploy/` against, a module a kind of file.

Each check is a function of the folder: it returns findings, one line each, or raises
``ToolMissingError`` where what it takes is not installed. It changes nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path


class ToolMissingError(Exception):
    """What a check takes is not here; the message says what, and where it comes from."""


def find_tool(name: str, *, comes_from: str) -> str:
    """Return a program's path: of this environment, or of the machine.

    Raises:
        ToolMissingError: it is in neither.
    """
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    if found is None:
        raise ToolMissingError(f"{name} is not installed; it comes with {comes_from}")
    return found


def lines_of(*command: str) -> list[str]:
    """Run a linter, which says nothing of what is right; return what it said, or how it ended."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode != 0 and not said:
        return [f"{command[0]} ended with {done.returncode}"]
    return said


def folder_of(module: str, *, comes_from: str) -> Path:
    """Return where a package lies, whose schemas are files; it is not imported.

    Raises:
        ToolMissingError: it is not installed.
    """
    found = util.find_spec(module)
    if found is None or found.origin is None:
        raise ToolMissingError(f"{module} is not installed; it comes with {comes_from}")
    return Path(found.origin).parent
