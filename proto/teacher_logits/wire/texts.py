"""Texts of a profile: how long each may be, and how many its hints may be.

What is said of a session is kept as long as it lives, so that every text has an end. Refuses the
message with the name of the field and both numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from teacher_logits.errors import RequestInvalidError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_TEXT_CHARS = 1024
MAX_HINTS = 64
"""Most namespaces, devices or versions that hints name."""


def check_texts(message: Message) -> None:
    """Refuse a profile with a text, or a list of texts, that is too long.

    Raises:
        RequestInvalidError: naming the field, and both numbers.
    """
    for field, value in message.ListFields():
        if isinstance(value, Message):
            check_texts(value)
            continue
        for text in _texts(field, value):
            if len(text) > MAX_TEXT_CHARS:
                raise _too_much(field, "characters", len(text), MAX_TEXT_CHARS)


def _texts(field: FieldDescriptor, value: object) -> Iterable[str]:
    """Return the texts of a field, whether it is one, a list, or a table."""
    if isinstance(value, str):
        return (value,)
    is_table = field.message_type is not None and field.message_type.GetOptions().map_entry
    if not is_table and field.type != FieldDescriptor.TYPE_STRING:
        return ()
    items = list(cast("Iterable[object]", value))
    if len(items) > MAX_HINTS:
        raise _too_much(field, "entries", len(items), MAX_HINTS)
    if is_table:
        items += [cast("dict[object, object]", value)[each] for each in list(items)]
    return [each for each in items if isinstance(each, str)]


def _too_much(field: FieldDescriptor, what: str, has: int, most: int) -> RequestInvalidError:
    return RequestInvalidError(
        f"{field.name} has {has} {what}; give at most {most}",
        facts={"field": field.name, "has": has, "limit": most},
    )
