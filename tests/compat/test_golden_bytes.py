"""Golden bytes: what was once said is read the same, and said the same, by every later release."""

import pytest
from google.protobuf.message_factory import GetMessageClass
from tests.compat.golden_bytes import FOLDER, fields_of, instances_of, said, schema
from tests.compat.schemas import FIRST

NEWEST = schema()


@pytest.mark.parametrize("name", NEWEST)
def test_a_message_has_golden_bytes_that_are_read_and_written_as_ever(name: str) -> None:
    kept = instances_of(name)
    assert kept, f"{name} has none: python -m tests.compat.golden_bytes, and commit its file"
    for each in kept:
        message = GetMessageClass(NEWEST[name]).FromString(each.data)
        assert said(message) == each.says
        assert message.SerializeToString(deterministic=True) == each.data


def test_no_message_with_golden_bytes_is_gone() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} <= set(NEWEST)


def test_every_field_of_a_release_has_golden_bytes() -> None:
    bare = {}
    for file in FIRST.files:
        for name, released in file.message_types_by_name.items():
            if file.package != "teacher_logits.v1":
                continue
            read = GetMessageClass(NEWEST[name]).FromString
            covered = {field for each in instances_of(name) for field in fields_of(read(each.data))}
            bare[name] = {field.name for field in released.fields} - covered
    assert {name: fields for name, fields in bare.items() if fields} == {}


def test_the_first_release_reads_the_golden_bytes_as_far_as_it_knew_them() -> None:
    for file in FIRST.files:
        for name in file.message_types_by_name if file.package == "teacher_logits.v1" else ():
            for each in instances_of(name):
                old = said(FIRST.message(name).FromString(each.data))
                assert old.keys() <= each.says.keys()
