"""Forks of a client's process: told at once, and never read what was overwritten."""

import inspect
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pytest
from tests.client import fork_stories

from teacher_logits_client import forks, testing

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
            timeout=200,
            check=False,
        )
    assert told.returncode == 0, told.stderr
    found: dict[str, str] = json.loads(told.stdout)
    return found


@pytest.mark.parametrize("story", STORIES)
def test_fork(story: str, ends: dict[str, str]) -> None:
    assert ends[story] == ""


class Holder:
    """Something that a child would read."""

    def before_fork(self, child: int) -> bool:
        return True

    def after_fork(self) -> None: ...

    def child_ended(self, child: int) -> None: ...


def test_a_child_that_no_thread_can_wait_for_does_not_keep_the_next_fork_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    holder = Holder()
    forks.watch(holder)
    with monkeypatch.context() as patch:
        forks._before()
        patch.setattr(threading, "Thread", refuse)
        with pytest.raises(RuntimeError):
            forks._in_parent()

    assert not forks._one_fork.locked()


def test_the_stories_are_found() -> None:
    assert len(STORIES) == 8
