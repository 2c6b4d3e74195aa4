"""Screens: a terminal that frames are drawn on in place, or lines that follow one another.

A terminal is drawn on in its other buffer, and is as it was afterwards, whatever ends it: a key,
SIGINT, SIGTERM, an error. What cannot be drawn on (a pipe, TERM=dumb) gets a frame for each look.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live

from teacher_logits_client.watching.frame import draw
from teacher_logits_client.watching.keys import typed, typing
from teacher_logits_client.watching.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from teacher_logits_client.watching.asking import Asking
    from teacher_logits_client.watching.frame import Scene

_REDRAWN_SECONDS = 1.0
"""A frame is drawn anew after this time at the latest: it counts how long a server is silent."""
EXIT_TERMINATED = 128 + signal.SIGTERM


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the caller, where rich would end the program with 1."""
        raise BrokenPipeError


def show(asking: Asking, *, address: str) -> None:
    """Show a server until a key ends it.

    Raises:
        ContractViolation: asking again cannot mend what the server said.
        KeyboardInterrupt: SIGINT came. ``SystemExit``: SIGTERM did.
        BrokenPipeError: nobody reads what is written.
    """
    console = _Console(highlight=False)
    is_drawn = console.is_terminal and not console.is_dumb_terminal
    # Where nothing is drawn on, a pager may want the keyboard.
    with _signals(asking.waking), typing() if is_drawn else nullcontext() as fd:
        watch = Watch(address, keys=fd is not None, now=time.monotonic())
        if not is_drawn:

            def follow(scene: Scene, is_new: bool) -> None:
                if is_new:
                    write(scene, console)

            _loop(asking, watch, fd, follow)
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:

            def paint(scene: Scene, is_new: bool) -> None:
                width, height = _size(console)
                lines = draw(scene, width=width, height=height)
                live.update(Group(*lines), refresh=True)

            _loop(asking, watch, fd, paint)


def write(scene: Scene, console: Console | None = None) -> None:
    """Write a frame as lines, all of it, and a blank line behind."""
    console = console or _Console(highlight=False)
    width, _ = _size(console)
    for each in [*draw(scene, width=width), ""]:
        console.print(each, soft_wrap=True, markup=False)
    console.file.flush()


def _loop(
    asking: Asking, watch: Watch, fd: int | None, paint: Callable[[Scene, bool], None]
) -> None:
    sources = [asking.woken] if fd is None else [asking.woken, fd]
    while True:
        answers = asking.take()
        for answer in answers:
            watch.answered(answer)
        paint(watch.scene(time.monotonic()), bool(answers))
        ready, _, _ = select.select(sources, [], [], _REDRAWN_SECONDS)
        if fd in ready and fd is not None:
            keys = typed(fd)
            if not keys or not watch.typed(keys):
                return


@contextmanager
def _signals(waking: int) -> Iterator[None]:
    """Wake for a change of the window's size, and end as SIGTERM asks."""

    def resized(number: int, frame: FrameType | None) -> None:
        del number, frame  # the wakeup descriptor has told already

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise SystemExit(EXIT_TERMINATED)

    handlers = {signal.SIGWINCH: resized, signal.SIGTERM: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    woken_before = signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)


def _size(console: Console) -> tuple[int, int]:
    """Return columns and lines. rich takes every dumb terminal for one of 80 columns."""
    if not console.is_dumb_terminal:
        return console.width, console.height
    try:
        width, height = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        width, height = shutil.get_terminal_size()
    return width or 80, height or 24
