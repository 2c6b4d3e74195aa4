"""A Python that has torch and the product in it already, and forks what it is asked to run.

Run by path, with the descriptor of its line; see `tests.forked`, which asks. A request is one
message: a description in JSON, and as descriptors the line on which the new process's id and
later its wait status are told, its three standard streams, and those that keep their numbers.
A new process takes milliseconds where a new interpreter takes seconds. It ends as any Python
does, with its threads joined, exit handlers run and an error's traceback; only the modules are
not taken apart. The line's end ends this one.
"""

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from importlib import import_module
from typing import Any

PRELOADED = (
    "teacher_logits_client.client",
    "teacher_logits_client.testing",
    "teacher_logits_server.app",
    "teacher_logits_server.cli",
)
FIRST_SPARE = 512
"""New descriptors lie here until they have their numbers."""
MOST_BYTES, MOST_DESCRIPTORS = 1 << 18, 64


def main(line: socket.socket) -> "Program | None":
    """Fork what the line asks for; return in a child with its program, in the end with None."""
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    children: dict[int, tuple[int, int]] = {}  # by pidfd: the process, and the line to report on
    while True:
        waiting, _, _ = select.select([line.fileno(), *children], [], [])
        for each in waiting:
            if each != line.fileno():
                _report_end(each, *children.pop(each))
                continue
            text, descriptors, *_ = socket.recv_fds(line, MOST_BYTES, MOST_DESCRIPTORS)
            if not text:
                return None
            report, *its_own = descriptors
            pid = os.fork()
            if pid == 0:
                line.detach()  # the program closes what is not its own
                return Program(json.loads(text), its_own)
            for descriptor in its_own:
                os.close(descriptor)
            os.write(report, b"%d" % pid)
            children[os.pidfd_open(pid)] = (pid, report)


def _report_end(pidfd: int, pid: int, report: int) -> None:
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):  # nobody may ask any more
        os.write(report, b"%d" % status)
    os.close(report)
    os.close(pidfd)


class Program:
    """What a child is to be: its descriptors, place and arguments."""

    def __init__(self, asked: dict[str, Any], descriptors: list[int]) -> None:
        self._asked = asked
        numbers = [0, 1, 2, *asked["pass_fds"]]
        spare = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, FIRST_SPARE) for each in descriptors]
        os.closerange(3, FIRST_SPARE)  # those of the parent, and those that were sent
        for each, number in zip(spare, numbers, strict=True):
            os.dup2(each, number)
            os.close(each)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])

    def run(self) -> None:
        """Run it as ``python`` runs ``-m module``, ``-c text`` or a file."""
        how, *rest = self._asked["arguments"]
        if how == "-m":
            sys.path[0], sys.argv = os.getcwd(), rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.path[0], sys.argv = "", ["-c", *rest[1:]]
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            exec(rest[0], module.__dict__)
        else:
            sys.path[0], sys.argv = os.path.dirname(os.path.abspath(how)), [how, *rest]
            runpy.run_path(how, run_name="__main__")


def exit_code_of(program: Program) -> int:
    """Run a program as the interpreter does: threads, exit handlers, a traceback for an error."""
    try:
        program.run()
        code: object = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not (code is None or isinstance(code, int)):
        sys.stderr.write(f"{code}\n")
        return 1
    return code or 0


if __name__ == "__main__":
    _program = main(socket.socket(fileno=int(sys.argv[1])))
    if _program is not None:
        _code = exit_code_of(_program)
        sys.stdout.flush()
        sys.stderr.flush()
        # What is left is to take apart all that was preloaded, page by copied page.
        os._exit(_code & 0xFF)
