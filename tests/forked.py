"""`Popen` of Python programs that are forked from one process that has torch in it already.

    process = forked.Popen([sys.executable, "-m", "tests.processes.reader", address], ...)

It is a `subprocess.Popen` in all that a test sees: a process of its own with its own id,
streams, environment, signals and exit code. Only the interpreter's start, some two seconds of
the processor with torch, is paid once for all of them. What is tried about the start itself,
about options of the interpreter or about what is imported takes `subprocess.Popen`.
"""

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, TimeoutExpired
from typing import Any, AnyStr, TypeAlias

__all__ = ["DEVNULL", "PIPE", "STDOUT", "Popen", "TimeoutExpired", "run"]

Done: TypeAlias = "subprocess.CompletedProcess[str]"

_ZYGOTE = Path(__file__).with_name("zygote.py")


@functools.cache
def _line() -> socket.socket:
    """Return the line to the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        zygote = subprocess.Popen(
            [sys.executable, str(_ZYGOTE), str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    atexit.register(zygote.wait)
    atexit.register(ours.close)  # which comes first, and ends it
    return ours


class Popen(subprocess.Popen[AnyStr]):
    """A process whose first argument is `sys.executable`, then a file, ``-m`` or ``-c``."""

    _report: socket.socket

    def _execute_child(self, args: Any, executable: Any, *given: Any) -> None:
        """Have it forked: what `subprocess.Popen` does by fork and exec."""
        pass_fds: Sequence[int]
        standard: list[int]
        pass_fds, cwd, env = given[2:5]
        pipes = given[8:14]
        program, *arguments = map(os.fspath, args)
        assert program == sys.executable, f"{program} is not Python"
        stdio = [pipes[0], pipes[3], pipes[5]]
        self._report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = {
            "arguments": arguments,
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "pass_fds": list(pass_fds),
        }
        with theirs:
            standard = [number if each == -1 else each for number, each in enumerate(stdio)]
            sent = [theirs.fileno(), *standard, *pass_fds]
            socket.send_fds(_line(), [json.dumps(asked).encode()], sent)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = int(self._report.recv(32))
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Hear of its end: what `subprocess.Popen` does by waitpid."""
        try:
            told = self._report.recv(32, socket.MSG_DONTWAIT if wait_flags else 0)
        except BlockingIOError:
            return 0, 0
        self._report.close()
        return self.pid, int(told)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            with self._waitpid_lock:  # type: ignore[attr-defined]
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(command: Sequence[str], *, timeout: float, cwd: Path | None = None) -> "Done":
    """Run a program to its end; return its exit code and what it said."""
    with Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, cwd=cwd) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)
