"""Stream codecs: what a student is granted of those that it asks for, in its order."""

import pytest

from teacher_logits.encodings import AS_WRITTEN, IdCodec, StreamCodec, ValueCodec
from teacher_logits.errors import RequestInvalidError
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ElementType
from teacher_logits.profiles import StudentProfile, TeacherProfile
from teacher_logits.selection_rules import Sampled
from teacher_logits_server.admission.stream_codecs import check_codecs, choose_codec

GRID = BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1)


def a_teacher(
    *, vocabulary: int = 50_000, written: str = "float16", arithmetic: str = "bfloat16"
) -> TeacherProfile:
    return TeacherProfile(
        teacher_id="t",
        vocabulary_size=vocabulary,
        head_rows=vocabulary,
        top_k=128,
        max_row_tokens=64,
        arithmetic_type=arithmetic,
        value_type=ElementType(written),
    )


def granted(
    teacher: TeacherProfile, *, is_published: bool = True, **wishes: object
) -> tuple[str, str]:
    student = StudentProfile(batch_grid=GRID, **wishes)  # type: ignore[arg-type]
    assert check_codecs(student, teacher, is_published=is_published) == []
    codec = choose_codec(student, teacher, is_published=is_published).codec
    return codec.values.value, codec.ids.value


def refused(teacher: TeacherProfile, **wishes: object) -> list[str]:
    student = StudentProfile(batch_grid=GRID, **wishes)  # type: ignore[arg-type]
    violations = check_codecs(student, teacher, is_published=True)
    assert {each.rule for each in violations} <= {"codec_unavailable"}
    return [each.message for each in violations]


def test_who_asks_for_nothing_gets_what_was_written() -> None:
    student = StudentProfile(batch_grid=GRID)
    terms = choose_codec(student, a_teacher(), is_published=True)

    assert terms.codec == AS_WRITTEN == StreamCodec()
    assert terms.bound.is_exact


@pytest.mark.parametrize(
    ("written", "asked", "value"),
    [
        ("float32", ("uint8", "float16"), "uint8"),
        ("float32", ("float16", "uint8"), "float16"),
        ("float32", ("float32",), "as_written"),
        ("float32", ("bfloat16_exact", "float16"), "bfloat16_exact"),
        ("float16", ("float16", "uint8"), "as_written"),
        ("float16", ("bfloat16", "float32", "uint8"), "uint8"),
        ("float16", ("bfloat16_exact", "as_written"), "as_written"),
        ("bfloat16", ("float16", "bfloat16"), "as_written"),
    ],
)
def test_the_first_that_saves_something_counts(
    written: str, asked: tuple[str, ...], value: str
) -> None:
    assert granted(a_teacher(written=written), value_codecs=asked) == (value, "int32")


def test_logits_are_no_choice_where_the_teacher_does_not_compute_in_bf16() -> None:
    teacher = a_teacher(written="float32", arithmetic="float32")

    assert granted(teacher, value_codecs=("bfloat16_exact", "float16"))[0] == "float16"


def test_what_an_engine_writes_is_the_student_s_own_value_type() -> None:
    teacher = a_teacher(written="float16")
    wishes = {"value_type": "float32", "value_codecs": ("float16",)}

    assert granted(teacher, is_published=False, **wishes)[0] == "float16"
    assert granted(teacher, is_published=False, value_codecs=("float16",))[0] == "as_written"


@pytest.mark.parametrize(
    ("vocabulary", "ids"),
    [
        (2**18, "packed18"),
        (2**18 + 1, "planes24"),
        (2**24 - 1, "planes24"),
        (2**24, "int32"),
    ],
)
def test_ids_go_by_the_first_codec_that_the_vocabulary_fits(vocabulary: int, ids: str) -> None:
    wishes = ("packed18", "planes24", "int32")

    assert granted(a_teacher(vocabulary=vocabulary), id_codecs=wishes)[1] == ids


def test_a_vocabulary_that_fits_none_is_refused_with_both_numbers() -> None:
    [message] = refused(a_teacher(vocabulary=300_000), id_codecs=("packed18",))

    assert message == (
        "300000 ids take part, and codec packed18 carries 262144 at most; end id_codecs with "
        "'planes24' or 'int32'"
    )


def test_values_of_which_no_codec_saves_anything_are_refused_with_the_way_out() -> None:
    [message] = refused(a_teacher(), value_codecs=("float32", "bfloat16"))

    assert "written in float16" in message
    assert "end value_codecs with 'as_written'" in message


@pytest.mark.parametrize(
    ("field", "asked", "as_it_is"),
    [
        ("value_codecs", ("uint8", "float16"), "as_written"),
        ("id_codecs", ("packed18", "planes24"), "int32"),
    ],
)
def test_samples_are_never_encoded_and_no_terms_say_that_they_are(
    field: str, asked: tuple[str, ...], as_it_is: str
) -> None:
    [message] = refused(a_teacher(), selection=Sampled(seed=7), **{field: asked})
    wishes = {"selection": Sampled(seed=7), field: (*asked, as_it_is)}

    assert f"codec {', '.join(asked)} does not carry; end {field} with '{as_it_is}'" in message
    assert granted(a_teacher(), is_published=False, **wishes) == ("as_written", "int32")
    student = StudentProfile(batch_grid=GRID, **wishes)  # type: ignore[arg-type]
    assert choose_codec(student, a_teacher(), is_published=False).bound.is_exact


def test_both_lists_are_refused_at_once() -> None:
    wishes = {"value_codecs": ("float32",), "id_codecs": ("packed18",)}

    assert len(refused(a_teacher(vocabulary=300_000), **wishes)) == 2


@pytest.mark.parametrize("field", ["value_codecs", "id_codecs"])
def test_a_codec_that_nobody_knows_is_refused_before_anything_is_sent(field: str) -> None:
    with pytest.raises(RequestInvalidError, match="'zstd', which is none of its choices"):
        StudentProfile(batch_grid=GRID, **{field: ("zstd",)})  # type: ignore[arg-type]


def test_the_bound_is_for_as_many_entries_as_there_can_be() -> None:
    student = StudentProfile(
        batch_grid=GRID,
        top_k=8,
        value_type=ElementType.FLOAT32,
        value_codecs=(ValueCodec.FLOAT16,),
    )
    teacher = a_teacher(written="float32")
    few, many = (
        choose_codec(student, teacher, is_published=published).bound.kl
        for published in (False, True)
    )

    assert few is not None
    assert many is not None
    assert 0 < few < many


def test_words_and_members_are_the_same() -> None:
    student = StudentProfile(batch_grid=GRID, value_codecs="uint8", id_codecs=IdCodec.PACKED18)  # type: ignore[arg-type]

    assert student.value_codecs == (ValueCodec.UINT8,)
    assert student.id_codecs == (IdCodec.PACKED18,)
