"""Interrupts (Ctrl-C) at every moment at which the interpreter lets a signal's handler run."""

import dis
import sys
import weakref
from functools import cache
from types import CodeType, FrameType, TracebackType
from typing import Any

_LETS_HANDLERS_RUN = ("CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
"""CPython looks for signals as it enters a function, after a call and on the way back in a loop."""
_FINALISER = weakref.finalize.__call__.__code__


class Interrupt:
    """Raises KeyboardInterrupt at one such moment in the code of a package, in this thread.

    Args:
        moment: at which, counted from 0.
        inside: what a source file's path must contain.
    """

    def __init__(self, moment: int, *, inside: str) -> None:
        self._left = moment
        self._inside = inside
        #: By frame, the place of the instruction before.
        self._before: dict[FrameType, int] = {}
        self.came_at = ""

    def __enter__(self) -> "Interrupt":
        self._former = sys.gettrace(), sys.unraisablehook
        sys.unraisablehook = lambda unraisable: None  # of a generator that was let go of
        sys.settrace(self._trace)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        trace_function, sys.unraisablehook = self._former
        sys.settrace(trace_function)
        self._before.clear()
        return isinstance(error, KeyboardInterrupt) and bool(self.came_at)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if self._inside not in frame.f_code.co_filename:
            return None
        if event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            self._perhaps_raise(frame)
        elif event == "opcode":
            before, self._before[frame] = self._before.get(frame), frame.f_lasti
            if before is not None and _lets_handlers_run(frame.f_code, before, frame.f_lasti):
                self._perhaps_raise(frame)
        return self._trace

    def _perhaps_raise(self, frame: FrameType) -> None:
        if self.came_at or _is_in_finaliser(frame):
            return
        if self._left == 0:
            code = frame.f_code
            self.came_at = f"{code.co_filename}:{frame.f_lineno}, {code.co_name}"
            raise KeyboardInterrupt
        self._left -= 1


def _lets_handlers_run(code: CodeType, before: int, here: int) -> bool:
    """Whether a handler may run behind an instruction, and what it raises can be raised here.

    There it would be raised by that instruction, whose ``with`` or ``try`` may end before this one.
    """
    name = dis.opname[code.co_code[before]]
    return name.startswith(_LETS_HANDLERS_RUN) and _handler(code, before) == _handler(code, here)


@cache
def _handler(code: CodeType, place: int) -> int | None:
    """Where an exception is handled that is raised at a place."""
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    return next((each.target for each in entries if each.start <= place < each.end), None)


def _is_in_finaliser(frame: FrameType | None) -> bool:
    """Whether what is raised here is swallowed: Python prints it, and goes on."""
    while frame is not None:
        if frame.f_code is _FINALISER or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
