"""Session terms and spans of time between their Python form and their messages."""

from __future__ import annotations

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from teacher_logits.errors import RequestInvalidError
from teacher_logits.terms import Check, SessionTerms, StreamTerms, Verdict
from teacher_logits.v1 import session_pb2
from teacher_logits.wire import (
    enum_from_wire,
    enum_to_wire,
    teacher_from_wire,
    teacher_to_wire,
)
from teacher_logits.wire.streams import (
    stream_terms_from_wire,
    stream_terms_to_wire,
)
from teacher_logits.wire.transport import settlement_from_wire, settlement_to_wire

_AS_IS = StreamTerms()
_FIRST_VERSION = 1
_ZERO, _NO_SPAN = timedelta(0), timedelta(-1)


def duration_to_wire(span: timedelta) -> Duration:
    """Return the message of a span of time."""
    message = Duration()
    message.FromTimedelta(span)
    return message


def duration_from_wire(message: Duration, *, field: str) -> timedelta:
    """Return a span of time.

    Raises:
        RequestInvalidError: it is below 0, or longer than anything that is counted here.
    """
    try:
        span: timedelta = message.ToTimedelta()
    except (OverflowError, ValueError):
        span = _NO_SPAN
    if span < _ZERO:
        raise RequestInvalidError(
            f"{field} is {message.seconds} s and {message.nanos} ns: that is no span of time",
            facts={"field": field, "seconds": message.seconds, "nanos": message.nanos},
        )
    return span


def session_to_wire(terms: SessionTerms) -> session_pb2.Session:
    """Return the message of a session's terms."""
    return session_pb2.Session(
        session_id=terms.session_id,
        epoch=terms.epoch,
        ttl=duration_to_wire(terms.ttl),
        renew_interval=duration_to_wire(terms.renew_interval),
        default_wait=duration_to_wire(terms.default_wait),
        teacher=teacher_to_wire(terms.teacher),
        checks=[
            session_pb2.Check(
                name=check.name,
                verdict=enum_to_wire(check.verdict, session_pb2.Verdict, "VERDICT_"),
                detail=check.detail,
            )
            for check in terms.checks
        ],
        transports=[settlement_to_wire(s) for s in terms.settlements],
        vocabulary_size=terms.vocabulary_size,
        max_request_tokens=terms.max_request_tokens,
        stream=stream_terms_to_wire(terms.stream),
        protocol_version=terms.protocol_version,
        features=sorted(terms.features),
    )


def session_from_wire(message: session_pb2.Session) -> SessionTerms:
    """Return a session's terms.

    Raises:
        RequestInvalidError: a word, or a span of time, that this release does not know.
    """
    return SessionTerms(
        session_id=message.session_id,
        epoch=message.epoch,
        ttl=duration_from_wire(message.ttl, field="ttl"),
        renew_interval=duration_from_wire(message.renew_interval, field="renew_interval"),
        default_wait=duration_from_wire(message.default_wait, field="default_wait"),
        teacher=teacher_from_wire(message.teacher),
        checks=tuple(
            Check(
                name=check.name,
                verdict=enum_from_wire(check.verdict, session_pb2.Verdict, "VERDICT_", Verdict),
                detail=check.detail,
            )
            for check in message.checks
        ),
        settlements=tuple(settlement_from_wire(s) for s in message.transports),
        vocabulary_size=message.vocabulary_size,
        max_request_tokens=message.max_request_tokens,
        stream=stream_terms_from_wire(message.stream) if message.HasField("stream") else _AS_IS,
        protocol_version=message.protocol_version or _FIRST_VERSION,
        features=frozenset(message.features),
    )
