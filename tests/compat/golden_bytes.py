"""Golden bytes: one filled instance and more of each message of the schema, kept in `golden/`.

    python -m tests.compat.golden_bytes

writes those of messages that have none, and adds instances for fields that no instance sets. It
changes none that is there: those bytes have been promised. A message has as many instances as
its widest oneof has members, so that each member is in one.
"""

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

import teacher_logits.v1

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Instance:
    """The bytes of a message, serialised deterministically, and what they say."""

    data: bytes
    says: Any

    @classmethod
    def of(cls, message: Message) -> "Instance":
        return cls(message.SerializeToString(deterministic=True), said(message))


def said(message: Message) -> Any:
    """What a message says, in protobuf's JSON, by the schema's names."""
    return MessageToDict(message, preserving_proto_field_name=True)


def schema() -> dict[str, Descriptor]:
    """Every message of the newest schema by its name."""
    (folder,) = teacher_logits.v1.__path__
    files = [
        import_module(f"teacher_logits.v1.{each.stem}_pb2").DESCRIPTOR
        for each in sorted(Path(folder).glob("*.proto"))
    ]
    return {name: each for file in files for name, each in file.message_types_by_name.items()}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def instances_of(name: str) -> list[Instance]:
    """Return what is kept of a message; nothing where it has no file."""
    if not path_of(name).exists():
        return []
    kept = json.loads(path_of(name).read_text("utf-8"))
    return [Instance(bytes.fromhex(each["bytes"]), each["says"]) for each in kept]


def fields_of(message: Message) -> set[str]:
    """The fields that an instance sets."""
    return {field.name for field, _ in message.ListFields()}


def filled(descriptor: Descriptor, turn: int) -> Message:
    """Return a message with every field set, of each oneof the member whose turn it is."""
    message = GetMessageClass(descriptor)()
    chosen = {
        oneof.fields[turn % len(oneof.fields)].name
        for oneof in descriptor.oneofs
        if len(oneof.fields) > 1
    }
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is None or len(oneof.fields) == 1 or field.name in chosen:
            _fill(message, field, turn)
    return message


def turns_of(descriptor: Descriptor) -> int:
    """How many instances it takes to have each member of each oneof in one."""
    return max((len(oneof.fields) for oneof in descriptor.oneofs), default=1)


def _fill(message: Any, field: FieldDescriptor, turn: int) -> None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = (_scalar(each, field.number) for each in kind.fields)
        getattr(message, field.name)[key] = value
    elif field.is_repeated and kind is not None:
        getattr(message, field.name).extend([filled(kind, turn), filled(kind, turn + 1)])
    elif field.is_repeated:
        getattr(message, field.name).extend([_scalar(field, 1), _scalar(field, 2)])
    elif kind is not None:
        getattr(message, field.name).CopyFrom(filled(kind, turn))
    else:
        setattr(message, field.name, _scalar(field, field.number))


def _scalar(field: FieldDescriptor, number: int) -> object:
    """A value that tells its field, and is not what an unset one has."""
    kinds = FieldDescriptor
    if field.enum_type is not None:
        values = field.enum_type.values
        return values[1 + number % (len(values) - 1)].number
    if field.type == kinds.TYPE_BOOL:
        return True
    if field.type == kinds.TYPE_STRING:
        return f"{field.name}-{number}"
    if field.type == kinds.TYPE_BYTES:
        return f"{field.name}-{number}".encode()
    if field.type in (kinds.TYPE_DOUBLE, kinds.TYPE_FLOAT):
        return number + 0.5
    return 1000 + number


def write(name: str, descriptor: Descriptor) -> bool:
    """Keep what is not kept of a message; say whether there was anything."""
    kept = instances_of(name)
    make = GetMessageClass(descriptor)
    covered = {field for each in kept for field in fields_of(make.FromString(each.data))}
    if kept and covered == {field.name for field in descriptor.fields}:
        return False
    fresh = [Instance.of(filled(descriptor, turn)) for turn in range(turns_of(descriptor))]
    whole = [*kept, *(each for each in fresh if each not in kept)]
    entries = [{"bytes": each.data.hex(), "says": each.says} for each in whole]
    path_of(name).write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
    return True


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, descriptor in schema().items():
        if write(name, descriptor):
            print(path_of(name).name)  # noqa: T201


if __name__ == "__main__":
    main()
