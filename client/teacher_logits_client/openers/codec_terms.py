"""Codec terms: that a session's streams are encoded as its student asked, and in nothing else.

A release that knew no codecs reads none of the wishes and says nothing of them; what it streams is
as it was written, which a student that asked for fewer bytes is told at the handshake and not by
its network. Another than the settled codec would cost more than the session certified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.encodings import IdCodec, ValueCodec
from teacher_logits.errors import PayloadInvalidError, SessionRefusedError, Violation
from teacher_logits.layout import ElementType
from teacher_logits.selection_rules import Sampled

if TYPE_CHECKING:
    from teacher_logits.encodings import StreamCodec
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import LeaseTerms, SessionTerms


def check_settled(profile: StudentProfile, terms: SessionTerms) -> None:
    """Let a session pass whose codec is one that its student asked for.

    Raises:
        SessionRefusedError: it is another, or none at all where as-written was not asked for.
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
    if violations:
        raise SessionRefusedError(violations)


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
