"""The client side's commands, ``demo``, ``doctor``, ``inspect``, ``top``: ``(argv) -> exit code``.

Exit codes: 0 done (and nothing worse than a warning), 1 failed, 2 called wrongly, or nothing could
be compared (``--parity``). Errors of the tree are raised to the entry point, which writes their
message. What a command needs beyond the standard library is imported when it runs, so that
``--help`` is quick.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError, TeacherLogitsError
from teacher_logits.transport import Locality
from teacher_logits_client.config import DEFAULT_TOLERANCE_NATS, check_timeout
from teacher_logits_client.connection_flags import (
    ADDRESS_HELP,
    add_connection,
    connection_of,
)
from teacher_logits_client.units import size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.config import Connection

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_NOT_COMPARED = 2

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
  teacher-logits inspect tls://teacher.example:5555 --tls-ca ca.pem --json | jq .pool.free_bytes

With --reclaim it takes room back by force, which nothing else does under a reader:

  teacher-logits inspect ADDRESS --reclaim quarantined          says what would happen
  teacher-logits inspect ADDRESS --reclaim quarantined --yes    and does it
  teacher-logits inspect ADDRESS --reclaim s-... --yes          a session and its leases
  teacher-logits inspect ADDRESS --reclaim l-... --yes          one lease
  teacher-logits inspect ADDRESS --reclaim teacher:ID --yes     steps that everybody left

With --parity it compares the teacher's numbers with some that were computed elsewhere:

  teacher-logits inspect ADDRESS --parity models/qwen3-8b       a model's folder, or .gguf
  teacher-logits inspect ADDRESS --parity mine.npz              rows, and what they should say
  teacher-logits inspect ADDRESS --parity mine.npz --step 7     a step that is registered

A model is run here, on the CPU, in the teacher's arithmetic type, over rows of drawn ids. A file
(.npz or .safetensors) has input_ids [N,S], lengths [N] or attention_mask [N,S] if rows are padded
(on the right), and logits or logprobs [N,S,V], or topk_ids and topk_logprobs [N,S,K], and nothing
else; position s is about token s+1. What publishers brought is compared with --step only.
Written are the largest difference of log-probabilities at the ids that the service hands out,
where it is, the loss by both, and whether a shift of positions or a temperature explains it."""

_INSPECT_END = """\
The JSON has stable keys, sizes in bytes and spans in seconds. A reader whose lease was
reclaimed raises StalePayloadError when it closes it, and must discard the step. Whoever compares
a step is one more student of its teacher meanwhile; where it is the only one, the step goes with
it. Exit codes: 0 shown, done, or the same numbers; 1 other numbers, or, without --parity, the
server could not be asked, or has no such lease; 2 called wrongly, or, with --parity, nothing
could be compared."""


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
    parser.add_argument("address", nargs="?", help=f"{ADDRESS_HELP} (default: visit none)")
    _add_common(parser)
    parser.add_argument(
        "--pool-size",
        metavar="BYTES",
        help="pool to hold memory against (default: that of the server at the address, if it is "
        "on this machine, else 1GiB as for `serve`)",
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
    pool_size_bytes = None
    if flags.pool_size is not None:
        pool_size_bytes = size_of(flags.pool_size, flag="--pool-size")

    from teacher_logits_client.doctor import Verdict, Visit, examine

    visit = None
    if flags.address is not None:
        visit = Visit(
            connection=connection_of(flags),
            timeout=timeout,
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
    parser.add_argument("address", help=ADDRESS_HELP)
    _add_common(parser)
    _add_reclaim(parser)
    _add_parity(parser)
    flags = parser.parse_args(argv)
    timeout = check_timeout(flags.timeout, what="--timeout")
    connection = connection_of(flags)
    _check_together(parser, flags)
    if flags.parity is not None:
        return _compare(connection, flags, timeout=timeout)
    if flags.reclaim is not None:
        from teacher_logits_client.inspecting.reclaiming import reclaim_or_tell

        _write(
            reclaim_or_tell(
                connection, flags.reclaim, yes=flags.yes, as_json=flags.json, timeout=timeout
            )
        )
        return EXIT_OK
    from teacher_logits_client.calls.inspection import inspect_server
    from teacher_logits_client.inspecting.as_json import as_json
    from teacher_logits_client.inspecting.text import as_text

    view = inspect_server(connection.address, credentials=connection.credentials, timeout=timeout)
    show = as_json if flags.json else as_text
    _write(show(view, address=str(connection)))
    return EXIT_OK


def top(argv: Sequence[str]) -> int:
    """Run ``teacher-logits top``: a running server, watched."""
    from teacher_logits_client.watching.command import run

    return run(argv)


def _compare(connection: Connection, flags: argparse.Namespace, *, timeout: float) -> int:
    from teacher_logits_client.parity.command import Question, find_parity

    question = Question(
        reference=flags.parity,
        row_count=flags.rows,
        step=flags.step,
        tolerance=flags.tolerance,
        teacher_id=flags.teacher_id,
    )
    try:
        found = find_parity(connection, question, timeout=timeout, warn=_complain)
    except ConfigError:
        raise
    except TeacherLogitsError as error:
        _complain(error.message)
        return EXIT_NOT_COMPARED
    _write(found.to_json() if flags.json else found.to_text())
    return EXIT_OK if found.parity.holds else EXIT_FAILED


def _add_reclaim(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reclaim",
        metavar="s-...|l-...|quarantined|teacher:ID",
        help="take the room of a session, a lease, or all in quarantine back by force",
    )
    parser.add_argument(
        "--yes", action="store_true", help="do it; without it, --reclaim says what would happen"
    )


def _add_parity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parity",
        metavar="MODEL|FILE",
        help="compare the teacher's numbers with a model's folder or .gguf, or with a file of them",
    )
    parser.add_argument(
        "--rows",
        type=_count_of,
        metavar="N",
        help="rows to compare (default: 4 of a model, all of a file)",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="compare the rows of a registered step"
    )
    parser.add_argument(
        "--tolerance",
        type=_nats_of,
        default=DEFAULT_TOLERANCE_NATS,
        metavar="NATS",
        help="how far a log-probability may be off (default: %(default)g; where both sides compute "
        "in fp32, 0.01 is fair)",
    )
    parser.add_argument("--teacher-id", default="", metavar="ID", help="the teacher to compare")


def _check_together(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Refuse flags that do not belong together; ends the program with 2."""
    if flags.yes and flags.reclaim is None:
        parser.error("--yes belongs to --reclaim")
    if flags.parity is not None and flags.reclaim is not None:
        parser.error("--parity and --reclaim do not go together")
    if flags.rows is not None and flags.step is not None:
        parser.error("--rows and --step do not go together: a step is compared as a whole")
    asked = flags.rows is not None or flags.step is not None or flags.teacher_id
    if flags.parity is None and (asked or flags.tolerance != DEFAULT_TOLERANCE_NATS):
        parser.error("--rows, --step, --tolerance and --teacher-id belong to --parity")


def _count_of(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of rows: give 1 or more")
    return count


def _nats_of(text: str) -> float:
    nats = float(text)
    if not 0 <= nats < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no tolerance: give 0 or more nats")
    return nats


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
    add_connection(parser)


def _complain(text: str) -> None:
    sys.stderr.write(f"teacher-logits inspect: {text}\n")
    sys.stderr.flush()


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
