"""A program under the filter that systemd makes of a unit's settings, by the library it uses.

    python hardened.py CALLS FAMILY MODULE ARGUMENTS...

``CALLS`` are the system calls that it may make, with commas between, and ``FAMILY`` the number of
its sockets' address family. All other calls fail with EPERM, and all other sockets with
EAFNOSUPPORT, as they do in the service.
"""

import ctypes
import errno
import os
import runpy
import sys
from ctypes.util import find_library

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NOT_EQUAL, _EQUAL = 1, 4
_NO_NEW_PRIVILEGES = 38


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_uint),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def confine(calls: list[str], family: int) -> None:
    """Put this process, and all that come from it, under the filter."""
    library = ctypes.CDLL(find_library("seccomp"), use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | errno.EPERM)))

    def rule(action: int, call: str, *comparisons: _Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(call.encode())
        if number < 0:
            return  # of another processor
        array = (_Comparison * len(comparisons))(*comparisons)
        done = library.seccomp_rule_add_array(
            context, ctypes.c_uint32(action), number, len(comparisons), array
        )
        if done:
            raise OSError(-done, f"{call}: {os.strerror(-done)}")

    for call in calls:
        if call != "socket":
            rule(_ALLOW, call)
    rule(_ALLOW, "socket", _Comparison(0, _EQUAL, family, 0))
    rule(_ERRNO | errno.EAFNOSUPPORT, "socket", _Comparison(0, _NOT_EQUAL, family, 0))
    if ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or library.seccomp_load(context):
        raise OSError("the filter cannot be set")


if __name__ == "__main__":
    confine(sys.argv[1].split(","), int(sys.argv[2]))
    sys.argv = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
