"""What a peer of another make may send: messages of any content, and payloads of any columns."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor as Field

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import COLUMN_RULES, ColumnKind, lay_out
from teacher_logits.payload import Payload, check_payload
from teacher_logits.selection_rules import TOP_K, ClientIds, Nucleus, Sampled, SelectionRule

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from google.protobuf.message import Message

_NUMBERS = (0, 0, 1, 1, 2, 3, 64, 256, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
_FLOATS = (0.0, 1.0, 1.0, 2.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"))
_TEXTS = ("", "a", "0123456789ab", "s-0123456789ab-1", "é" * 3, "x" * 300, "\0")
_BYTES = (b"", b"x", bytes(16), b"\xff" * 64)
_UNKNOWN_ENUMS = (999, -1)
_RANGES = {
    Field.TYPE_INT32: (-(2**31), 2**31 - 1),
    Field.TYPE_UINT32: (0, 2**32 - 1),
    Field.TYPE_FIXED32: (0, 2**32 - 1),
    Field.TYPE_INT64: (-(2**63), 2**63 - 1),
    Field.TYPE_UINT64: (0, 2**64 - 1),
    Field.TYPE_FIXED64: (0, 2**64 - 1),
}
SELECTIONS: tuple[SelectionRule, ...] = (TOP_K, Nucleus(mass=0.5), Sampled(seed=1), ClientIds())


def filled(dice: random.Random, message: Any, *, depth: int = 0) -> Any:
    """Fill a message with whatever its fields can hold; return it."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < (0.3 if depth < 3 else 0.7):
            continue
        here = getattr(message, field.name)
        count = dice.choice((0, 1, 2, 7))
        if field.message_type and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            here.update({_value(dice, key): _value(dice, value) for _ in range(count)})
        elif field.is_repeated and field.message_type:
            for _ in range(count):
                filled(dice, here.add(), depth=depth + 1)
        elif field.is_repeated:
            here.extend(_value(dice, field) for _ in range(count))
        elif field.message_type:
            filled(dice, here, depth=depth + 1)
        else:
            setattr(message, field.name, _value(dice, field))
    return message


def _value(dice: random.Random, field: Field) -> object:
    if field.type == Field.TYPE_BOOL:
        return dice.random() < 0.5
    if field.enum_type is not None:
        return dice.choice([*(each.number for each in field.enum_type.values), *_UNKNOWN_ENUMS])
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return dice.choice(_FLOATS)
    if field.type == Field.TYPE_STRING:
        return dice.choice(_TEXTS)
    if field.type == Field.TYPE_BYTES:
        return dice.choice(_BYTES)
    least, most = _RANGES[field.type]
    return min(max(dice.choice(_NUMBERS), least), most)


def message_class(name: str) -> Callable[[], Message]:
    """The class of a message by its module and name, as an annotation has them."""
    module, _, found = name.partition(".")
    module = {"messages": "operator_service_pb2"}.get(module, module)
    made: Callable[[], Message] = getattr(
        importlib.import_module(f"teacher_logits.v1.{module}"), found
    )
    return made


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A payload that somebody describes well, whatever it is, and its bytes."""

    payload: Payload
    data: bytearray


def foreign(dice: random.Random, like: Payload, data: bytes) -> Foreign | None:
    """A payload that resembles another in most; None where its description does not hold."""
    has = [column.kind for column in like.columns if dice.random() > 0.06]
    kinds = {column.kind for column in like.columns}
    others = [kind for kind in ColumnKind if kind not in kinds and dice.random() < 0.05]
    counts = {
        "row_count": _near(dice, like.row_count),
        "position_count": _near(dice, like.position_count),
        "top_k": _near(dice, like.top_k),
    }
    sizes = {
        "P": counts["position_count"],
        "N": counts["row_count"],
        "N+1": counts["row_count"] + 1,
        "K": counts["top_k"],
        "M": counts["top_k"],
        "T": len(like.temperatures),
    }
    written = {column.kind: column for column in like.columns}
    if ColumnKind.ROW_RUNS in written:
        sizes["R"] = written[ColumnKind.ROW_RUNS].shape[1]
    specs = []
    for kind in (*has, *others):
        types, axes = COLUMN_RULES[kind]
        keeps = kind in written and dice.random() < 0.95
        choices = sorted(types, key=lambda each: each.value)
        element_type = written[kind].element_type if keeps else dice.choice(choices)
        shape = [axis if isinstance(axis, int) else sizes.get(axis, 2) for axis in axes]
        specs.append((kind, element_type, shape))
    columns, size_bytes = lay_out(specs)
    room = bytearray(size_bytes)
    for column in columns:
        old = written.get(column.kind)
        own = b"" if old is None else data[old.offset_bytes : old.end_bytes]
        if old is None or dice.random() < 0.12:
            own = _noise(dice, column.size_bytes)
        own = own.ljust(column.size_bytes, b"\0")[: column.size_bytes]
        room[column.offset_bytes : column.end_bytes] = own
    payload = Payload(
        **{
            **vars(like),
            **counts,
            "columns": columns,
            "size_bytes": size_bytes,
            "vocabulary_size": dice.choice([like.vocabulary_size] * 8 + [0, 1]),
            "bad_row_count": 0,
            "whole_rows": dice.random() < 0.3,
            "selection": like.selection if dice.random() < 0.9 else dice.choice(SELECTIONS),
        }
    )
    try:
        check_payload(payload)
    except PayloadInvalidError:
        return None
    return Foreign(payload=payload, data=room)


def _near(dice: random.Random, number: int) -> int:
    return number if dice.random() < 0.93 else dice.choice([0, 1, 2, number + 1])


def _noise(dice: random.Random, size: int) -> bytes:
    kind = dice.randrange(4)
    if kind == 0:
        return dice.randbytes(size)
    return (b"\0", b"\xff", b"\x7f", b"\x00\x7c")[kind] * size
