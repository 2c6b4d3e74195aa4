"""The command ``teacher-logits top``: its flags, and one frame or many."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError
from teacher_logits_client.config import check_timeout
from teacher_logits_client.connection_flags import ADDRESS_HELP, add_connection, connection_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.views import ServerView

EXIT_OK = 0
LEAST_INTERVAL_SECONDS = 0.1

_DESCRIPTION = """\
Watch a running server: its pool, payloads by transport and how fast they come, its teachers and
what waits for them, steps and whom they wait for, refusals, and every session.

  teacher-logits top unix:/run/teacher-logits/teacher.sock
  teacher-logits top tls://teacher.example:5555 --tls-ca ca.pem --interval 5
  teacher-logits top ADDRESS --once | less

Keys: q quit; p or space pause, and go on; s sort sessions by what they have leased, by how long
they were not seen, by state, by name. A server that does not answer is asked again; one that was
started anew is shown as such."""

_EPILOG = """\
Rates are those of the last 5 seconds. BYTES/S are of payloads that leases were granted on, by the
transport that they come over; only what is COPIED was sent. FILL is how full the teacher's passes
were, BUSY how much of the time there was one. What cannot be drawn on (a pipe, TERM=dumb) gets a
frame after each look. Exit codes: 0 ended by q, or shown once; 1 the server could not be asked
(--once), or does not let you; 2 called wrongly; 130 or 143 interrupted."""


@dataclass(frozen=True, kw_only=True)
class _Wish:
    address: str
    ask: Callable[[], ServerView]
    interval: float
    once: bool


def run(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ConfigError: the address or a flag is wrong, or ``rich`` is not installed.
        TeacherLogitsError: the server could not be asked, with ``--once``; or what it said cannot
            be mended by asking again.
    """
    wish = _read(argv)
    if find_spec("rich") is None:
        raise ConfigError(
            "top draws with rich, which is not installed: pip install 'teacher-logits[top]' "
            "(teacher-logits inspect shows the same once, without)"
        )
    try:
        return _once(wish) if wish.once else _watch(wish)
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _watch(wish: _Wish) -> int:
    from teacher_logits_client.watching.asking import Asking
    from teacher_logits_client.watching.screen import show

    with Asking(wish.ask, interval=wish.interval) as asking:
        show(asking, address=wish.address)
    return EXIT_OK


def _once(wish: _Wish) -> int:
    """Look twice, an interval apart, so that there are rates."""
    from teacher_logits_client.watching.asking import Answer
    from teacher_logits_client.watching.screen import write
    from teacher_logits_client.watching.watch import Watch

    watch = Watch(wish.address, keys=False, now=time.monotonic())
    watch.answered(Answer(at=time.monotonic(), view=wish.ask()))
    time.sleep(wish.interval)
    watch.answered(Answer(at=time.monotonic(), view=wish.ask()))
    write(watch.scene(time.monotonic()))
    return EXIT_OK


def _read(argv: Sequence[str]) -> _Wish:
    parser = argparse.ArgumentParser(
        prog="teacher-logits top",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("address", help=ADDRESS_HELP)
    parser.add_argument("--once", action="store_true", help="show one frame, and end")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="from one look to the next (default: 1; with --once, between the two that rates take)",
    )
    add_connection(parser)
    flags = parser.parse_args(argv)
    if not LEAST_INTERVAL_SECONDS <= flags.interval <= 3600:
        raise ConfigError(
            f"--interval {flags.interval:g}: give {LEAST_INTERVAL_SECONDS} to 3600 seconds",
            facts={"flag": "--interval", "value": flags.interval},
        )
    timeout = check_timeout(flags.timeout, what="--timeout")
    connection = connection_of(flags)
    from teacher_logits_client.calls.inspection import inspect_server

    address = connection.address
    return _Wish(
        address=str(connection),
        ask=partial(inspect_server, address, credentials=connection.credentials, timeout=timeout),
        interval=flags.interval,
        once=flags.once,
    )
