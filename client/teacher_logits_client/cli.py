"""The client side's commands: ``demo``, ``doctor`` and ``inspect``, each ``(argv) -> exit code``.

Exit codes: 0 done (and nothing worse than a warning), 1 failed, 2 called wrongly. Errors of
the tree are raised to the entry point, which writes their message. What a command needs
beyond the standard library is imported when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from teacher_logits.transport import Locality
from teacher_logits_client.config import DEFAULT_TIMEOUT_SECONDS, check_timeout, parse_address
from teacher_logits_client.units import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_OK = 0
EXIT_FAILED = 1

_DOCTOR = """\
Find what stands in the way of sharing memory between teacher and student on this machine,
and say how to mend it. Everything is tried for real and nothing is changed.

  teacher-logits doctor
  teacher-logits doctor unix:/run/teacher-logits/teacher.sock
  teacher-logits doctor unix:/run/teacher-logits/teacher.sock --locality require --json

With an address it also visits that server: is it there, does it admit a student, over which
transport would payloads come, and what refused the better ones."""

_DOCTOR_END = """\
Each finding is ok, warn (bytes are sent that could be shared, or memory is short) or fail
(the work stops). Exit codes: 0 no fail, 1 a fail, 2 called wrongly."""

_INSPECT = """\
Show what a running server holds: sessions and how their payloads come, steps and whom they
wait for, leases, the pool of shared memory, the queue of scoring requests.

  teacher-logits inspect unix:/run/teacher-logits/teacher.sock
  teacher-logits inspect 127.0.0.1:5555 --json | jq .pool.free_bytes

With --reclaim it takes room back by force, which nothing else does under a reader:

  teacher-logits inspect ADDRESS --reclaim quarantined          says what would happen
  teacher-logits inspect ADDRESS --reclaim quarantined --yes    and does it
  teacher-logits inspect ADDRESS --reclaim s-... --yes          a session and its leases
  teacher-logits inspect ADDRESS --reclaim l-... --yes          one lease
  teacher-logits inspect ADDRESS --reclaim teacher:ID --yes     steps that everybody left"""

_INSPECT_END = """\
The JSON has stable keys, sizes in bytes and spans in seconds. A reader whose lease was
reclaimed raises StalePayloadError when it closes it, and must discard the step. Exit codes:
0 shown or done, 1 the server could not be asked, or has no such lease, 2 called wrongly."""


def demo(argv: Sequence[str]) -> int:
    """Run ``teacher-logits demo``: a real teacher, a student that learns from it."""
    from teacher_logits_client.demo.command import run

    return run(argv, write=_write)


def doctor(argv: Sequence[str]) -> int:
    """Run ``teacher-logits doctor``; 1 where something fails.

    Raises:
        ConfigError: the address or a flag is wrong.
    """
    parser = _parser("doctor", _DOCTOR, _DOCTOR_END)
    parser.add_argument("address", nargs="?", help="a server to visit: unix:/path or host:port")
    _add_common(parser)
    parser.add_argument(
        "--pool-size",
        default="1GiB",
        metavar="BYTES",
        help="pool to hold memory against; that of `serve` is 1GiB too where not given",
    )
    parser.add_argument("--teacher-id", default="", metavar="ID", help="the teacher to ask for")
    parser.add_argument(
        "--locality",
        default=Locality.PREFER.value,
        choices=[Locality.PREFER.value, Locality.REQUIRE.value],
        help="require: fail unless memory is shared with the server (default: prefer)",
    )
    flags = parser.parse_args(argv)
    timeout = check_timeout(flags.timeout, what="--timeout")
    pool_size_bytes = size_of(flags.pool_size, flag="--pool-size")

    from teacher_logits_client.doctor import Verdict, Visit, examine

    visit = None
    if flags.address is not None:
        visit = Visit(
            address=flags.address,
            timeout=timeout,
            insecure=flags.insecure,
            teacher_id=flags.teacher_id,
            locality=Locality(flags.locality),
        )
    report = examine(pool_size_bytes=pool_size_bytes, visit=visit)
    _write(report.to_json() if flags.json else report.to_text())
    return EXIT_FAILED if report.verdict is Verdict.FAIL else EXIT_OK


def inspect(argv: Sequence[str]) -> int:
    """Run ``teacher-logits inspect``.

    Raises:
        ConfigError: the address or a flag is wrong.
        ServerUnreachableError, DeadlinePassedError: the server could not be asked.
        SessionExpiredError, LeaseLostError: there is nothing of that name to reclaim.
    """
    parser = _parser("inspect", _INSPECT, _INSPECT_END)
    parser.add_argument("address", help="where the server is: unix:/path or host:port")
    _add_common(parser)
    parser.add_argument(
        "--reclaim",
        metavar="s-...|l-...|quarantined",
        help="take the room of a session, a lease, or all in quarantine back by force",
    )
    parser.add_argument(
        "--yes", action="store_true", help="do it; without it, --reclaim says what would happen"
    )
    flags = parser.parse_args(argv)
    timeout = check_timeout(flags.timeout, what="--timeout")
    address = parse_address(flags.address, insecure=flags.insecure)

    from teacher_logits_client.calls.inspection import inspect_server
    from teacher_logits_client.inspect_json import as_json
    from teacher_logits_client.inspect_view import as_text

    if flags.yes and flags.reclaim is None:
        parser.error("--yes belongs to --reclaim")
    if flags.reclaim is not None:
        from teacher_logits_client.reclaiming import reclaim_or_tell

        _write(
            reclaim_or_tell(
                address, flags.reclaim, yes=flags.yes, as_json=flags.json, timeout=timeout
            )
        )
        return EXIT_OK
    view = inspect_server(address, timeout=timeout)
    show = as_json if flags.json else as_text
    _write(show(view, address=str(address)))
    return EXIT_OK


def _parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"teacher-logits {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help=f"how long the server may take to answer (default: {DEFAULT_TIMEOUT_SECONDS:g})",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow an address on another host; nothing is encrypted",
    )


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
