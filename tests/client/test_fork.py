"""Forks of a client's process: told at once, and never read what was overwritten."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.client import fork_stories

from teacher_logits_client import testing

ROOT = Path(__file__).parents[2]
STORIES = [
    name
    for name, story in vars(fork_stories).items()
    if inspect.isfunction(story) and list(inspect.signature(story).parameters) == ["address"]
    if name != "lease_count"
]


@pytest.fixture(scope="module")
def ends() -> dict[str, str]:
    """How each story ended. Told in one process, since it is the start of one that lasts."""
    python = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning"]
    with testing.serve(pool_size="1MiB", slab_size="1MiB", folder=ROOT) as server:
        told = subprocess.run(
            [
                *python,
                "-m",
                "tests.client.fork_stories",
                server.address,
                *STORIES,
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=55,
            check=False,
        )
    assert told.returncode == 0, told.stderr
    found: dict[str, str] = json.loads(told.stdout)
    return found


@pytest.mark.parametrize("story", STORIES)
def test_fork(story: str, ends: dict[str, str]) -> None:
    assert ends[story] == ""


def test_the_stories_are_found() -> None:
    assert len(STORIES) == 7
