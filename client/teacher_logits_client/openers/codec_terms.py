"""Codec terms: that a session's streams are encoded as its student asked, and in nothing else.

A release that knew no codecs reads none of the wishes and says nothing of them; what it streams is
as it was written, which a student that asked for fewer bytes is told at the handshake and not by
its network. Another than the settled codec would cost more than the session certified, and so would
one whose error the server certifies to be less than it can be.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

from teacher_logits.encodings import IdCodec, ValueCodec
from teacher_logits.error_bounds import ErrorBound, bound_of
from teacher_logits.errors import PayloadInvalidError, SessionRefusedError, Violation
from teacher_logits.layout import VALUE_TYPES, ElementType
from teacher_logits.selection_rules import Sampled

if TYPE_CHECKING:
    from teacher_logits.encodings import StreamCodec
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import LeaseTerms, SessionTerms

_ROUNDING = 1e-9
"""What two machines' logarithms may differ by, relative to a bound."""


def check_settled(profile: StudentProfile, terms: SessionTerms) -> None:
    """Let a session pass whose codec is one that its student asked for.

    Raises:
        SessionRefusedError: it is another, or none at all where as-written was not asked for; or
            the server certifies less error than the codec can cost.
    """
    codec = terms.stream.codec
    violations = []
    for name, settled, asked, plain in (
        ("value_codecs", codec.values.value, profile.value_codecs, _as_written(profile, terms)),
        ("id_codecs", codec.ids.value, profile.id_codecs, {IdCodec.INT32.value}),
    ):
        wanted = {each.value for each in asked} or plain
        may_be = wanted | (plain if wanted & plain else set())
        if settled not in may_be and not isinstance(profile.selection, Sampled):
            listed = ", ".join(each.value for each in asked) or "none"
            message = (
                f"{name} asks for {listed}, and the server has settled on {settled}: it may be of "
                f"a release that knows no codecs; use the same on both sides, or leave {name} out"
            )
            facts = {name: listed, "settled": settled}
            violations.append(Violation(rule="codec_unavailable", message=message, facts=facts))
    violations += _check_bound(profile, terms)
    if violations:
        raise SessionRefusedError(violations)


def _check_bound(profile: StudentProfile, terms: SessionTerms) -> list[Violation]:
    """Refuse a bound below every one that the codec can have here.

    Larger is no harm. What it hangs on is the server's to know: the type that is written, and how
    many entries.
    """
    teacher, stream = terms.teacher, terms.stream
    own = [
        bound_of(stream.codec, written=written, top_k=top_k)
        for written in {teacher.value_type, profile.value_type or ElementType.FLOAT16}
        for top_k in {max(1, profile.top_k), max(1, profile.top_k, teacher.top_k)}
        if written in VALUE_TYPES  # what another make says is looked at elsewhere
    ]
    violations = []
    for name in (each.name for each in fields(ErrorBound)):
        certified = _number(stream.bound, name)
        least = min((_number(each, name) for each in own), default=0.0)
        if certified < least * (1 - _ROUNDING):
            message = (
                f"the server certifies {name} {certified:g} of codec {stream.codec.values.value}, "
                f"and by this release it is {least:g}: use the same release on both sides"
            )
            violations.append(
                Violation(
                    rule="codec_unavailable",
                    message=message,
                    facts={"bound": name, "certified": certified, "least": least},
                )
            )
    return violations


def _number(bound: ErrorBound, name: str) -> float:
    """Return a number of a bound; infinity where nothing holds of every position."""
    number: float | None = getattr(bound, name)
    return math.inf if number is None else number


def _as_written(profile: StudentProfile, terms: SessionTerms) -> set[str]:
    """Return the names of all that changes nothing of what the teacher writes."""
    written = {terms.teacher.value_type, profile.value_type or ElementType.FLOAT16}
    return {ValueCodec.AS_WRITTEN.value, *(each.value for each in written)}


def check_encoding(lease: LeaseTerms, codec: StreamCodec) -> None:
    """Let a lease pass that is streamed in its session's codec, or as it was written.

    Raises:
        PayloadInvalidError: it is streamed in another.
    """
    if lease.encoding is None:
        return
    used = lease.encoding.codec
    if used.values in (codec.values, ValueCodec.AS_WRITTEN) and used.ids in (
        codec.ids,
        IdCodec.INT32,
    ):
        return
    raise PayloadInvalidError(
        f"payload {lease.payload.payload_id} is streamed in {used.values.value} and "
        f"{used.ids.value}, and the session was settled on {codec.values.value} and "
        f"{codec.ids.value}, whose error it certified: the server is at fault",
        facts={"values": used.values.value, "ids": used.ids.value},
    )
