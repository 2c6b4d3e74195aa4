"""A file that is touched, and who is woken by that: the least that a seal can cost a reader.

    python -m benchmarks.anchors.touch FILE

says that it is there, and then, for each line of its standard input, rests, touches the file, and
says when it began to, in nanoseconds of the machine's clock.
"""

from __future__ import annotations

import os
import select
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.publisher import A_MOMENT_SECONDS
from benchmarks.report import write_line

from teacher_logits_client.line.file_watch import FileWatch

if TYPE_CHECKING:
    from benchmarks.processes import Child


class Woken:
    """Waits for the touches of a child that runs this module."""

    def __init__(self, toucher: Child, fd: int) -> None:
        self._toucher = toucher
        self._watch = FileWatch()
        self._watch.add(fd)
        self._poll = select.poll()
        self._poll.register(self._watch.fd, select.POLLIN)
        toucher.hear()

    def microseconds(self) -> float:
        """Ask for a touch, wait for it, and return what lay between it and being awake."""
        self._toucher.tell("touch")
        self._poll.poll()
        awake_ns = time.monotonic_ns()
        self._watch.drain()
        return (awake_ns - int(str(self._toucher.hear()["called_ns"]))) / 1e3


def serve(path: str) -> int:
    """Touch a file whenever it is asked for, until standard input ends."""
    fd = os.open(path, os.O_RDWR)
    write_line({"ready": True})
    for _ in sys.stdin:
        time.sleep(A_MOMENT_SECONDS)
        called = time.monotonic_ns()
        os.utime(fd)
        write_line({"called_ns": called})
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
