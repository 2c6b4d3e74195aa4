"""Errors on the wire: one table between the error tree and ``google.rpc.Status``.

Each error travels as its status code, its message, and details: one ``ErrorInfo`` with
the reason and the facts, a ``BadRequest`` with one field violation a broken rule, and a
``RetryInfo`` where the raiser knows. A status stays under 4 KiB, since gRPC drops trailers
over 8 KiB and with them the real error: rules that find no room there with their sentence are
named, and those that find none at all are counted in the fact ``violations_left_out``.
Whatever is not of the tree becomes INTERNAL, and its text does not cross the wire.

How facts are written: numbers as Python writes them, text as it is, or quoted where it would
read as a number. A field violation's ``reason`` names its facts, which stand in the
``ErrorInfo``; one that has another value for a name has it there under ``name-index``.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from teacher_logits import errors
from teacher_logits.errors import Fact, TeacherLogitsError, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from google.protobuf.message import Message

DOMAIN = "teacher-logits"
DETAILS_KEY = "grpc-status-details-bin"
MAX_STATUS_BYTES = 4096

# The message travels twice, once percent-encoded (three bytes for one, at worst).
_MAX_MESSAGE_BYTES = 700
_MAX_FACT_BYTES = 200
_MAX_FACTS_BYTES = 1200
_MAX_NAME_BYTES = 64
_MAX_DESCRIPTION_BYTES = 300
_MOST_NAMED = 24
_NO_ROOM = "(its sentence found no room)"
#: What wraps the details: three type URLs, tags, the count of what was left out.
_WRAPPING_BYTES = 320

Code = grpc.StatusCode

M = TypeVar("M", bound="Message")

#: Every class of the tree with its code; one that is not here has its nearest base's.
CODES: dict[type[TeacherLogitsError], grpc.StatusCode] = {
    errors.TeacherLogitsError: Code.INTERNAL,
    errors.ContractViolation: Code.FAILED_PRECONDITION,
    errors.SessionRefusedError: Code.FAILED_PRECONDITION,
    errors.GridMismatchError: Code.INVALID_ARGUMENT,
    errors.RequestInvalidError: Code.INVALID_ARGUMENT,
    errors.PayloadInvalidError: Code.INVALID_ARGUMENT,
    errors.AlignmentError: Code.FAILED_PRECONDITION,
    errors.UnknownTeacherError: Code.NOT_FOUND,
    errors.PayloadConflictError: Code.ALREADY_EXISTS,
    errors.NotAllowedError: Code.PERMISSION_DENIED,
    errors.UnknownCallerError: Code.UNAUTHENTICATED,
    errors.EpochChangedError: Code.FAILED_PRECONDITION,
    errors.StaleReference: Code.ABORTED,
    errors.NotAvailable: Code.UNAVAILABLE,
    errors.PayloadRetiredError: Code.NOT_FOUND,
    errors.DeadlinePassedError: Code.DEADLINE_EXCEEDED,
    errors.PoolFullError: Code.RESOURCE_EXHAUSTED,
    errors.LimitReachedError: Code.RESOURCE_EXHAUSTED,
    errors.HostCopyNeededError: Code.FAILED_PRECONDITION,
    errors.EngineError: Code.INTERNAL,
    errors.TransportFailure: Code.UNAVAILABLE,
}

#: Rules about sizes and grids: a refusal that starts with one is INVALID_ARGUMENT.
_ARGUMENT_RULES = frozenset(
    {
        "not_positive",
        "gbs_mismatch",
        "student_dp_indivisible",
        "teacher_dp_indivisible",
        "student_mbs_indivisible",
        "teacher_mbs_indivisible",
        "rank_out_of_range",
        "readers_exceed_group",
    }
)

_WHOLE = re.compile(r"-?[0-9]+\Z")
_REAL = re.compile(r"-?([0-9]+\.[0-9]+(e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+|inf|nan)\Z")


def tree() -> Iterator[type[TeacherLogitsError]]:
    """Yield every public class of ``errors``, bases first.

    A class that another module derives travels as the nearest one of these.
    """
    waiting = [TeacherLogitsError]
    while waiting:
        kind = waiting.pop(0)
        if not kind.__name__.startswith("_") and kind.__module__ == errors.__name__:
            yield kind
        waiting.extend(kind.__subclasses__())


BY_REASON: dict[str, type[TeacherLogitsError]] = {kind.reason: kind for kind in tree()}


def code_of(error: TeacherLogitsError) -> grpc.StatusCode:
    """Return the status code an error travels under."""
    if isinstance(error, errors.SessionRefusedError) and (
        error.violations[0].rule in _ARGUMENT_RULES
    ):
        return Code.INVALID_ARGUMENT
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def to_status(error: BaseException) -> status_pb2.Status:
    """Return the status of an error; one that is not of the tree tells nothing of itself."""
    if not isinstance(error, TeacherLogitsError):
        error = TeacherLogitsError("the server failed; its log says where")
    violations: Sequence[Violation] = getattr(error, "violations", ())
    message = _joined(violations) if violations else _cut(error.message, _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    _put_facts(info, error.facts)
    bad_request = error_details_pb2.BadRequest()
    room = MAX_STATUS_BYTES - status.ByteSize() - _WRAPPING_BYTES
    left_out = _put_violations(bad_request, info, violations, room)
    if left_out:
        info.metadata["violations_left_out"] = str(left_out)
    status.details.append(_packed(info))
    if violations:
        status.details.append(_packed(bad_request))
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(error.retry_after)
        status.details.append(_packed(retry))
    return status


def from_status(status: status_pb2.Status) -> TeacherLogitsError | None:
    """Return the error of a status that this project made, or None."""
    try:
        info = _unpacked(status, error_details_pb2.ErrorInfo())
        if info is None or info.domain != DOMAIN:
            return None
        bad_request = _unpacked(status, error_details_pb2.BadRequest())
        retry = _unpacked(status, error_details_pb2.RetryInfo())
        retry_after = None if retry is None else retry.retry_delay.ToTimedelta()
        facts = {name: _fact(text) for name, text in info.metadata.items()}
    except (DecodeError, OverflowError, ValueError):
        return None
    kind = BY_REASON.get(info.reason, TeacherLogitsError)
    if not issubclass(kind, errors._RuleError):
        return kind(status.message, facts=facts, retry_after=retry_after)
    violations = [] if bad_request is None else _violations(bad_request, facts)
    error = kind(violations or [Violation(rule="unknown", message=status.message)])
    error.message, error.args = status.message, (status.message,)
    error.facts = {name: value for name, value in facts.items() if "-" not in name}
    error.retry_after = retry_after
    return error


def _joined(violations: Sequence[Violation]) -> str:
    """Return the message of a refusal: whole violations while they fit, and how many more."""
    text = ""
    for index, violation in enumerate(violations):
        more = f"{'; ' if index else ''}{violation.rule}: {violation.message}"
        if len((text + more).encode("utf-8", "replace")) > _MAX_MESSAGE_BYTES:
            if index == 0:
                text, index = _cut(more, _MAX_MESSAGE_BYTES), 1
            rest = len(violations) - index
            return f"{_cut(text, _MAX_MESSAGE_BYTES)}; and {rest} more" if rest else text
        text += more
    return _cut(text, _MAX_MESSAGE_BYTES)


def _put_facts(info: error_details_pb2.ErrorInfo, facts: Mapping[str, Fact]) -> None:
    """Write facts while they fit; the first are the first violation's."""
    for name, value in facts.items():
        name, text = _cut(name, _MAX_NAME_BYTES), _fact_text(value)
        if info.ByteSize() + len(name) + len(text.encode()) > _MAX_FACTS_BYTES:
            return
        info.metadata[name] = text


def _put_violations(
    bad_request: error_details_pb2.BadRequest,
    info: error_details_pb2.ErrorInfo,
    violations: Sequence[Violation],
    room: int,
) -> int:
    """Write violations while they fit into ``room`` with the info; return how many do not.

    One that does not fit with its sentence and its numbers is named at least.
    """
    for index, violation in enumerate(violations):
        names, own = [], {}
        for name, value in violation.facts.items():
            name, text = _cut(name, _MAX_NAME_BYTES), _fact_text(value)
            if info.metadata.get(name) != text:
                name = f"{name}-{index}"
                own[name] = text
            names.append(name)
        entry = bad_request.field_violations.add(
            field=_cut(violation.rule, _MAX_NAME_BYTES),
            description=_cut(violation.message, _MAX_DESCRIPTION_BYTES),
            reason=",".join(names),
        )
        own_bytes = sum(len(n) + len(text.encode()) + 8 for n, text in own.items())
        # Room is kept for the names of those that follow.
        later = sum(
            len(v.rule) + len(_NO_ROOM) + 8 for v in violations[index + 1 : index + 1 + _MOST_NAMED]
        )
        if info.ByteSize() + bad_request.ByteSize() + own_bytes + later > room:
            entry.description, entry.reason = _NO_ROOM, ""
            own = {}
        if info.ByteSize() + bad_request.ByteSize() > room:
            del bad_request.field_violations[-1]
            return len(violations) - index
        for name, text in own.items():
            info.metadata[name] = text
    return 0


def _violations(
    bad_request: error_details_pb2.BadRequest, facts: Mapping[str, Fact]
) -> list[Violation]:
    return [
        Violation(
            rule=violation.field,
            message=violation.description,
            facts={
                name.partition("-")[0]: facts[name]
                for name in violation.reason.split(",")
                if name in facts
            },
        )
        for violation in bad_request.field_violations
    ]


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _unpacked(status: status_pb2.Status, message: M) -> M | None:
    """Read the detail of a message's kind into it; None where there is none."""
    return next((message for detail in status.details if detail.Unpack(message)), None)


def _fact_text(value: Fact) -> str:
    if not isinstance(value, str):
        return str(value)
    text = _cut(value, _MAX_FACT_BYTES)
    if text.startswith('"') or _WHOLE.match(text) or _REAL.match(text):
        return json.dumps(text, ensure_ascii=False)
    return text


def _fact(text: str) -> Fact:
    if _WHOLE.match(text):
        return int(text)
    if _REAL.match(text):
        return float(text)
    try:
        return str(json.loads(text)) if text.startswith('"') else text
    except ValueError:
        return text


def _cut(text: str, most_bytes: int) -> str:
    """Return text that UTF-8 can write in at most so many bytes."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most_bytes:
        return data.decode()
    return data[: most_bytes - 3].decode("utf-8", "ignore") + "…"
