"""Run a Python program as a container does: in namespaces of its own, with other mounts.

    python apart.py PLACE MODULE_OR_FILE ARGUMENTS...

``PLACE`` is JSON: ``kinds``, the namespaces that are its own beside the user's; ``uid``, another
user's number; ``join``, a process whose user and PID namespaces it enters instead; ``mounts``,
arguments of `mount`, made in this order. It ends when whoever started it ends it.
"""

import codecs
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys

_USER = 0x10000000
_KINDS = {"mount": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000,
          "net": 0x40000000}  # fmt: skip
_SET_DEATH_SIGNAL, _SET_DUMPABLE = 1, 4
_C = ctypes.CDLL(None, use_errno=True)


def enter(*, kinds: list[str], uid: int | None, join: int | None, mounts: list[list[str]]) -> None:
    """Be there from now on, in a process of its own where that takes one."""
    if uid is not None:
        for codec in ("ascii", "idna"):
            codecs.lookup(codec)  # that user may not be able to read where Python lies
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        _must(_C.prctl(_SET_DUMPABLE, 1, 0, 0, 0))  # its own /proc/self is root's otherwise
    if join is not None:
        for name in ("user", "pid_for_children"):
            with open(f"/proc/{join}/ns/{name}") as namespace:
                _must(_C.setns(namespace.fileno(), 0))
    else:
        _leave(kinds)
    if join is not None or "pid" in kinds:
        _go_on_in_child()
    if "mount" in kinds:
        mounts = [["--make-rprivate", "/"], *mounts]
    for arguments in mounts:
        subprocess.run(["mount", *arguments], check=True)


def _leave(kinds: list[str]) -> None:
    """A user namespace gives the right to have the others; one user is in it."""
    uid, gid = os.geteuid(), os.getegid()
    _must(_C.unshare(_USER | sum(_KINDS[kind] for kind in kinds)))
    maps = {"setgroups": "deny", "uid_map": f"0 {uid} 1", "gid_map": f"0 {gid} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _go_on_in_child() -> None:
    """A PID namespace begins with the next child; it ends with us, as we end with it."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _must(_C.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))


def _must(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    place = json.loads(sys.argv[1])
    enter(
        kinds=place.get("kinds", []),
        uid=place.get("uid"),
        join=place.get("join"),
        mounts=place.get("mounts", []),
    )
    sys.argv = sys.argv[2:]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
