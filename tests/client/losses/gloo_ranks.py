"""Ranks of gloo as processes that wait for stories: started once, and asked as often as one likes.

A story is a function of a module, called on every rank of a group with its arguments, which are
plain data. The ranks are forked from one process that has torch in it already.
"""

from __future__ import annotations

import multiprocessing
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

T = TypeVar("T")
PATIENCE = timedelta(seconds=120)
#: How long the one who asks waits: longer than any collective.
DEADLINE = 150.0


class Ranks:
    """So many processes, and a group of the first n of them for every n."""

    def __init__(self, count: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.client.losses.gloo_ranks"])
        self.count = count
        self._lines: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, count, str(folder / "meeting")), daemon=True
            )
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def run(self, count: int, story: Callable[..., T], *arguments: object) -> list[T]:
        """What each of the first ``count`` ranks makes of ``story(group, rank, *arguments)``."""
        for line in self._lines[:count]:
            line.send((count, story, arguments))
        return [self._answer(rank) for rank in range(count)]

    def close(self) -> None:
        """End the processes."""
        for line in self._lines:
            with suppress(OSError):
                line.send(None)
        for process in self._processes:
            process.join(DEADLINE)
            if process.is_alive():
                process.kill()
                process.join()

    def _answer(self, rank: int) -> Any:
        assert self._lines[rank].poll(DEADLINE), f"rank {rank} does not answer"
        failed, answer = self._lines[rank].recv()
        assert not failed, f"rank {rank}: {answer}"
        return answer


def _serve(line: Connection, rank: int, count: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{meeting}", rank=rank, world_size=count, timeout=PATIENCE
    )
    groups = {n: dist.new_group(range(n), timeout=PATIENCE) for n in range(1, count + 1)}
    while (asked := line.recv()) is not None:
        size, story, arguments = asked
        try:
            answer = False, story(groups[size], rank, *arguments)
        except Exception:
            answer = True, traceback.format_exc()
        line.send(answer)
    dist.destroy_process_group()
