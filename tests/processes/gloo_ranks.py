"""Ranks of a program that really reduce: forked from one process, each leaves what it found."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

Said: TypeAlias = dict[str, object]


def fork_ranks(count: int, run: Callable[[int, Path], None], folder: Path) -> int:
    """Run each rank in a child of this process; 0 where all of them came through."""
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            run(rank, folder)
            os._exit(0)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children)


def said_by_ranks(module: str, count: int, folder: Path) -> list[Said]:
    """Run a module over its ranks; return what each has left in the folder."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [
        cast("Said", json.loads((folder / f"rank-{rank}.json").read_text("utf-8")))
        for rank in range(count)
    ]
