"""Errors on the wire: one table between the error tree and ``google.rpc.Status``.

Each error travels as its status code, its message, and details: one ``ErrorInfo`` with
the reason and the facts, a ``BadRequest`` with one field violation a broken rule, and a
``RetryInfo`` where the raiser knows. Details stay under 4 KiB, since gRPC drops trailers
over 8 KiB and with them the real error: rules that find no room are counted in the fact
``violations_left_out``. Whatever is not of the tree becomes INTERNAL, and its text does
not cross the wire.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from teacher_logits import errors
from teacher_logits.errors import Fact, TeacherLogitsError, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DOMAIN = "teacher-logits"
DETAILS_KEY = "grpc-status-details-bin"
MAX_DETAILS_BYTES = 4096
_MAX_MESSAGE_CHARS = 1000
_MAX_FACT_CHARS = 200
_MAX_FACTS = 32

Code = grpc.StatusCode

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
    errors.EpochChangedError: Code.FAILED_PRECONDITION,
    errors.StaleReference: Code.ABORTED,
    errors.NotAvailable: Code.UNAVAILABLE,
    errors.PayloadRetiredError: Code.NOT_FOUND,
    errors.DeadlinePassedError: Code.DEADLINE_EXCEEDED,
    errors.PoolFullError: Code.RESOURCE_EXHAUSTED,
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
    }
)

_NUMBER = re.compile(r"-?\d+\Z")


def tree() -> Iterator[type[TeacherLogitsError]]:
    """Yield every public class of the error tree, bases first."""
    waiting = [TeacherLogitsError]
    while waiting:
        kind = waiting.pop(0)
        if not kind.__name__.startswith("_"):
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
    status = status_pb2.Status(
        code=code_of(error).value[0], message=_cut(error.message, _MAX_MESSAGE_CHARS)
    )
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={
            name[:64]: _cut(str(value), _MAX_FACT_CHARS)
            for name, value in list(error.facts.items())[:_MAX_FACTS]
        },
    )
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(error.retry_after)
        status.details.append(_packed(retry))
    violations = getattr(error, "violations", ())
    bad_request, left_out = _bad_request(violations, MAX_DETAILS_BYTES - info.ByteSize() - 512)
    if left_out:
        info.metadata["violations_left_out"] = str(left_out)
    if violations:
        status.details.append(_packed(bad_request))
    status.details.insert(0, _packed(info))
    return status


def from_status(status: status_pb2.Status) -> TeacherLogitsError | None:
    """Return the error of a status that this project made, or None."""
    details = {detail.type_url.rpartition("/")[2]: detail for detail in status.details}
    info = error_details_pb2.ErrorInfo()
    packed = details.get(info.DESCRIPTOR.full_name)
    if packed is None or not packed.Unpack(info) or info.domain != DOMAIN:
        return None
    facts = {name: _fact(value) for name, value in info.metadata.items()}
    kind = BY_REASON.get(info.reason, TeacherLogitsError)
    if issubclass(kind, errors._RuleError):
        return _rule_error(kind, details, facts, status.message)
    return kind(status.message, facts=facts, retry_after=_retry_after(details))


def _rule_error(
    kind: type[errors._RuleError],
    details: Mapping[str, any_pb2.Any],
    facts: dict[str, Fact],
    message: str,
) -> TeacherLogitsError:
    bad_request = error_details_pb2.BadRequest()
    packed = details.get(bad_request.DESCRIPTOR.full_name)
    if packed is not None:
        packed.Unpack(bad_request)
    violations = [
        Violation(
            rule=violation.field,
            message=violation.description,
            facts={n: facts[n] for n in violation.reason.split(",") if n in facts},
        )
        for violation in bad_request.field_violations
    ]
    error = kind(violations or [Violation(rule="unknown", message=message)])
    error.facts.update(facts)
    return error


def _bad_request(
    violations: tuple[Violation, ...], room: int
) -> tuple[error_details_pb2.BadRequest, int]:
    """Pack as many violations as fit; the names of their facts ride in ``reason``."""
    message = error_details_pb2.BadRequest()
    for index, violation in enumerate(violations):
        message.field_violations.add(
            field=violation.rule,
            description=_cut(violation.message, 300),
            reason=",".join(violation.facts),
        )
        if message.ByteSize() > room:
            del message.field_violations[-1]
            return message, len(violations) - index
    return message, 0


def _retry_after(details: Mapping[str, any_pb2.Any]) -> timedelta | None:
    retry = error_details_pb2.RetryInfo()
    packed = details.get(retry.DESCRIPTOR.full_name)
    if packed is None or not packed.Unpack(retry):
        return None
    return retry.retry_delay.ToTimedelta()


def _packed(message: error_details_pb2.ErrorInfo | object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed


def _fact(text: str) -> Fact:
    return int(text) if _NUMBER.match(text) else text


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
