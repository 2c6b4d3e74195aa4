"""Profiles between their Python form and their messages.

Nothing is repaired on the way in: an enum this side does not know is refused by name. What a
message cannot hold (no whole number, or one beyond int32) is refused on the way out.
"""

from __future__ import annotations

import enum
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from teacher_logits.encodings import IdCodec, ValueCodec
from teacher_logits.errors import RequestInvalidError
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.profiles import StudentProfile, TeacherProfile, VocabularyPolicy
from teacher_logits.shard_parts import ShardedBy
from teacher_logits.transport import Locality, Transport
from teacher_logits.v1 import profile_pb2, tensor_pb2, transport_pb2
from teacher_logits.wire.grids import (
    batch_grid_from_wire,
    batch_grid_to_wire,
    hints_from_wire,
    hints_to_wire,
    model_grid_from_wire,
    model_grid_to_wire,
)
from teacher_logits.wire.selection import selection_from_wire, selection_to_wire
from teacher_logits.wire.texts import check_texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

E = TypeVar("E", bound=enum.Enum)

MAX_COLUMNS, MAX_TRANSPORTS, MAX_WIRE_TEMPERATURES = 64, 16, 16
"""Most entries of a profile's lists; what is read at all, not what is granted."""


@contextmanager
def sending(what: str) -> Iterator[None]:
    """Name what a message cannot hold.

    Raises:
        RequestInvalidError: a number is out of range or none, or text is no text.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RequestInvalidError(
            f"the {what} cannot be sent: {error}; sizes and ranks are whole numbers below 2**31"
        ) from error


def enum_to_wire(member: enum.Enum, wire_enum: Any, prefix: str) -> Any:
    """Return the wire number of an enum member, found by its name."""
    return wire_enum.Value(prefix + member.name)


def enum_from_wire(
    number: int, wire_enum: Any, prefix: str, kind: type[E], *, field: str = ""
) -> E:
    """Return the member of a wire number; ``field`` is the message's, if not as the enum's name.

    Raises:
        RequestInvalidError: the number is unspecified or not known to this release.
    """
    name = wire_enum.Name(number) if number in wire_enum.values() else ""
    member = kind.__members__.get(name.removeprefix(prefix)) if name else None
    if member is None:
        field = field or prefix.rstrip("_").lower()
        known = ", ".join(kind.__members__)
        what = f"{field} is not set" if number == 0 else f"{field} {number} is not known here"
        raise RequestInvalidError(
            f"{what}; give one of {known}",
            facts={"field": field, "number": number, "enum": kind.__name__},
        )
    return member


def check_count(items: Sized, most: int, *, field: str) -> None:
    """Refuse a list of more than ``most`` entries before any of them is looked at.

    Raises:
        RequestInvalidError: it has more, with both numbers.
    """
    if len(items) > most:
        raise RequestInvalidError(
            f"{field} has {len(items)} entries; give at most {most}",
            facts={"field": field, "entries": len(items), "limit": most},
        )


def element_type_to_wire(value: ElementType) -> tensor_pb2.ElementType:
    """Return the wire form of an element type."""
    return enum_to_wire(value, tensor_pb2.ElementType, "ELEMENT_TYPE_")  # type: ignore[no-any-return]


def element_type_from_wire(number: int, *, field: str = "") -> ElementType:
    """Return the element type of a wire number."""
    return enum_from_wire(number, tensor_pb2.ElementType, "ELEMENT_TYPE_", ElementType, field=field)


def column_kind_to_wire(value: ColumnKind) -> tensor_pb2.ColumnKind:
    """Return the wire form of a column kind."""
    return enum_to_wire(value, tensor_pb2.ColumnKind, "COLUMN_KIND_")  # type: ignore[no-any-return]


def column_kind_from_wire(number: int) -> ColumnKind:
    """Return the column kind of a wire number."""
    return enum_from_wire(number, tensor_pb2.ColumnKind, "COLUMN_KIND_", ColumnKind)


def value_codec_to_wire(value: ValueCodec) -> tensor_pb2.ValueCodec:
    """Return the wire form of a value codec."""
    return enum_to_wire(value, tensor_pb2.ValueCodec, "VALUE_CODEC_")  # type: ignore[no-any-return]


def value_codec_from_wire(number: int) -> ValueCodec:
    """Return the value codec of a wire number."""
    return enum_from_wire(number, tensor_pb2.ValueCodec, "VALUE_CODEC_", ValueCodec)


def id_codec_to_wire(value: IdCodec) -> tensor_pb2.IdCodec:
    """Return the wire form of an id codec."""
    return enum_to_wire(value, tensor_pb2.IdCodec, "ID_CODEC_")  # type: ignore[no-any-return]


def id_codec_from_wire(number: int) -> IdCodec:
    """Return the id codec of a wire number."""
    return enum_from_wire(number, tensor_pb2.IdCodec, "ID_CODEC_", IdCodec)


def transport_to_wire(value: Transport) -> transport_pb2.Transport:
    """Return the wire form of a transport."""
    return enum_to_wire(value, transport_pb2.Transport, "TRANSPORT_")  # type: ignore[no-any-return]


def transport_from_wire(number: int) -> Transport:
    """Return the transport of a wire number."""
    return enum_from_wire(number, transport_pb2.Transport, "TRANSPORT_", Transport)


def teacher_to_wire(teacher: TeacherProfile) -> profile_pb2.TeacherProfile:
    """Return the message of a teacher profile."""
    return profile_pb2.TeacherProfile(
        teacher_id=teacher.teacher_id,
        revision=teacher.revision,
        batch_grid=batch_grid_to_wire(teacher.batch_grid) if teacher.batch_grid else None,
        model_grid=model_grid_to_wire(teacher.model_grid) if teacher.model_grid else None,
        tokenizer_fingerprint=teacher.tokenizer_fingerprint,
        vocabulary_size=teacher.vocabulary_size,
        head_rows=teacher.head_rows,
        top_k=teacher.top_k,
        temperatures=teacher.temperatures,
        columns=[column_kind_to_wire(c) for c in teacher.columns],
        engine=teacher.engine,
        arithmetic_type=teacher.arithmetic_type,
        hints=hints_to_wire(teacher.hints),
        max_row_tokens=teacher.max_row_tokens,
        data_parallel_rank=teacher.data_parallel_rank,
        value_type=element_type_to_wire(teacher.value_type),
        selection=selection_to_wire(teacher.selection),
        sharded_by=[
            enum_to_wire(each, profile_pb2.ShardedBy, "SHARDED_BY_") for each in teacher.sharded_by
        ],
    )


def teacher_from_wire(message: profile_pb2.TeacherProfile) -> TeacherProfile:
    """Return the teacher profile of a message.

    Raises:
        RequestInvalidError: a list or a text is too long, or an enum is not set or not known.
    """
    check_texts(message)
    check_count(message.columns, MAX_COLUMNS, field="columns")
    check_count(message.temperatures, MAX_WIRE_TEMPERATURES, field="temperatures")
    return TeacherProfile(
        teacher_id=message.teacher_id,
        revision=message.revision,
        batch_grid=batch_grid_from_wire(message.batch_grid)
        if message.HasField("batch_grid")
        else None,
        model_grid=model_grid_from_wire(message.model_grid)
        if message.HasField("model_grid")
        else None,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocabulary_size=message.vocabulary_size,
        head_rows=message.head_rows,
        top_k=message.top_k,
        temperatures=tuple(message.temperatures),
        columns=tuple(column_kind_from_wire(c) for c in message.columns),
        engine=message.engine,
        arithmetic_type=message.arithmetic_type,
        hints=hints_from_wire(message.hints),
        max_row_tokens=message.max_row_tokens,
        data_parallel_rank=message.data_parallel_rank,
        value_type=element_type_from_wire(message.value_type, field="value_type"),
        selection=selection_from_wire(message.selection),
        sharded_by=tuple(
            enum_from_wire(each, profile_pb2.ShardedBy, "SHARDED_BY_", ShardedBy)
            for each in message.sharded_by[:MAX_COLUMNS]
        ),
    )


def student_to_wire(student: StudentProfile) -> profile_pb2.StudentProfile:
    """Return the message of a student profile.

    Raises:
        RequestInvalidError: a message cannot hold it.
    """
    with sending("student's profile"):
        return profile_pb2.StudentProfile(
            teacher_id=student.teacher_id,
            batch_grid=batch_grid_to_wire(student.batch_grid),
            model_grid=model_grid_to_wire(student.model_grid) if student.model_grid else None,
            data_parallel_rank=student.data_parallel_rank,
            tokenizer_fingerprint=student.tokenizer_fingerprint,
            vocabulary_size=student.vocabulary_size,
            vocabulary_policy=enum_to_wire(
                student.vocabulary_policy, profile_pb2.VocabularyPolicy, "VOCABULARY_POLICY_"
            ),
            top_k=student.top_k,
            temperatures=student.temperatures,
            columns=[column_kind_to_wire(c) for c in student.columns],
            value_type=element_type_to_wire(student.value_type) if student.value_type else None,
            selection=selection_to_wire(student.selection) if student.selection else None,
            student_id=student.student_id,
            readers_per_rank=student.readers_per_rank,
            engine=student.engine,
            arithmetic_type=student.arithmetic_type,
            transports=[transport_to_wire(t) for t in student.transports],
            locality=enum_to_wire(student.locality, profile_pb2.Locality, "LOCALITY_"),
            hints=hints_to_wire(student.hints),
            value_codecs=[value_codec_to_wire(c) for c in student.value_codecs],
            id_codecs=[id_codec_to_wire(c) for c in student.id_codecs],
        )


def student_from_wire(message: profile_pb2.StudentProfile) -> StudentProfile:
    """Return the student profile of a message.

    Raises:
        RequestInvalidError: a list or a text is too long, or an enum is not set or not known.
    """
    check_texts(message)
    check_count(message.columns, MAX_COLUMNS, field="columns")
    for field in ("transports", "value_codecs", "id_codecs"):
        check_count(getattr(message, field), MAX_TRANSPORTS, field=field)
    check_count(message.temperatures, MAX_WIRE_TEMPERATURES, field="temperatures")
    policies, asked = profile_pb2.VocabularyPolicy, message.value_type
    return StudentProfile(
        teacher_id=message.teacher_id,
        batch_grid=batch_grid_from_wire(message.batch_grid),
        model_grid=model_grid_from_wire(message.model_grid)
        if message.HasField("model_grid")
        else None,
        data_parallel_rank=message.data_parallel_rank,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocabulary_size=message.vocabulary_size,
        vocabulary_policy=enum_from_wire(
            message.vocabulary_policy, policies, "VOCABULARY_POLICY_", VocabularyPolicy
        ),
        top_k=message.top_k,
        temperatures=tuple(message.temperatures),
        columns=tuple(column_kind_from_wire(c) for c in message.columns),
        value_type=element_type_from_wire(asked, field="value_type") if asked else None,
        selection=selection_from_wire(message.selection) if message.HasField("selection") else None,
        student_id=message.student_id,
        readers_per_rank=message.readers_per_rank,
        engine=message.engine,
        arithmetic_type=message.arithmetic_type,
        transports=tuple(transport_from_wire(t) for t in message.transports),
        value_codecs=tuple(value_codec_from_wire(c) for c in message.value_codecs),
        id_codecs=tuple(id_codec_from_wire(c) for c in message.id_codecs),
        locality=enum_from_wire(message.locality, profile_pb2.Locality, "LOCALITY_", Locality),
        hints=hints_from_wire(message.hints),
    )
