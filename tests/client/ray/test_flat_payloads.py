"""Flat payloads: a step's tensors in one run of bytes, checked where they are made and read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.digest import row_digest
from teacher_logits.errors import AlignmentError, PayloadInvalidError, RequestInvalidError
from teacher_logits.layout import ElementType
from teacher_logits_client.ray.attaching import attach
from teacher_logits_client.ray.descriptions import (
    Expected,
    FlatColumn,
    PayloadDescription,
    check_description,
)
from teacher_logits_client.ray.flat import FlatPayload
from teacher_logits_client.ray.teacher import DeferredTeacher

N, S, K = 2, 3, 4


class OwnRoom:
    """Room without Ray: what is put stays here, and is the answer's source."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.back = 0

    def take(self, size_bytes: int) -> np.ndarray:
        self.taken.append(size_bytes)
        return np.full(size_bytes, 255, dtype=np.uint8)

    def put(self, description: PayloadDescription, buffer: np.ndarray) -> FlatPayload:
        return FlatPayload(description=description, buffer=buffer)

    def give_back(self, buffer: np.ndarray) -> None:
        self.back += 1


def teacher(**more: object) -> DeferredTeacher:
    return DeferredTeacher(data_parallel_rank=0, room=OwnRoom(), **more)  # type: ignore[arg-type]


def told(
    *, values: torch.dtype = torch.float32, ids: torch.dtype = torch.int64
) -> dict[str, torch.Tensor]:
    numbers = torch.arange(N * S * K).view(N, S, K)
    return {"topk_logits": (numbers / 8).to(values), "topk_indices": numbers.to(ids)}


def put(
    tensors: dict[str, torch.Tensor], by: DeferredTeacher | None = None, **more: object
) -> FlatPayload:
    given_ = {"step": 1, "rows": range(N), **more}
    answer = (by or teacher()).put(tensors, **given_)  # type: ignore[arg-type]
    assert isinstance(answer.source, FlatPayload)
    return answer.source


def batch(**more: object) -> dict[str, object]:
    return {"input_ids": torch.zeros(N, S, dtype=torch.int64), **more}


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_every_bit_comes_through(
    shape: tuple[int, int, int], values: torch.dtype, ids: torch.dtype
) -> None:
    tensors = {
        "topk_logits": torch.randn(shape).to(values),
        "topk_indices": torch.randint(0, 1 << 30, shape).to(ids),
    }
    flat = put(tensors, rows=range(shape[0]))

    for name, view in flat.views().items():
        assert view.dtype == tensors[name].dtype
        assert torch.equal(view, tensors[name])
    assert all(each.offset_bytes % 256 == 0 for each in flat.description.columns)


def test_a_tensor_that_is_no_row_major_one_is_copied_to_its_place() -> None:
    tensors = told()
    turned = {
        name: each.transpose(0, 2).contiguous().transpose(0, 2) for name, each in tensors.items()
    }

    for name, view in put(turned).views().items():
        assert torch.equal(view, tensors[name])


def test_views_are_of_the_payloads_own_bytes_and_copies_are_not() -> None:
    flat = put(told())
    lies = flat.buffer.ctypes.data

    assert flat.views()["topk_logits"].data_ptr() == lies
    assert flat.copies()["topk_logits"].data_ptr() != lies


def test_packed_entries_take_six_bytes() -> None:
    flat = put(told(), teacher(value_type=ElementType.BFLOAT16, id_type=ElementType.INT32))

    views = flat.views()
    assert sum(each.nbytes for each in views.values()) == 6 * N * S * K
    assert torch.equal(views["topk_logits"], told()["topk_logits"].bfloat16())


def test_ids_that_do_not_fit_are_not_packed() -> None:
    tensors = told()
    tensors["topk_indices"][1, 2, 3] = 1 << 31
    by = teacher(id_type=ElementType.INT32)

    with pytest.raises(PayloadInvalidError, match="2147483648 do not fit"):
        put(tensors, by)
    assert put(tensors).description.id_range == (0, 1 << 31)
    assert isinstance(by.room, OwnRoom)
    assert by.room.taken == []


def test_values_that_become_infinite_when_packed_are_refused_by_every_replica() -> None:
    tensors = told()
    tensors["topk_logits"][1, 2, 3] = 65_536.0
    for is_representative in (True, False):
        by = teacher(value_type=ElementType.FLOAT16, is_representative=is_representative)
        with pytest.raises(PayloadInvalidError, match="65536 do not fit"):
            put(tensors, by)
    out = {name: torch.zeros(N, S, K, dtype=each.dtype) for name, each in tensors.items()}
    out["topk_logits"] = out["topk_logits"].half()
    with pytest.raises(PayloadInvalidError, match="65536 do not fit"):
        put(tensors).copy_into(out)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("topk_logits", float("nan"), "NaN"),
        ("topk_logits", float("inf"), "inf"),
        ("topk_indices", -1, "ids from -1"),
        ("topk_indices", 100, "to 100"),
    ],
)
def test_what_a_loss_would_choke_on_is_refused_where_it_is_made(
    name: str, value: float, said: str
) -> None:
    tensors = told()
    tensors[name][0, 1, 2] = value

    with pytest.raises(PayloadInvalidError, match=said):
        put(tensors, teacher(vocabulary_size=100))


def test_minus_infinity_is_a_logit() -> None:
    tensors = told()
    tensors["topk_logits"][0, 0, 0] = -float("inf")

    assert put(tensors).views()["topk_logits"][0, 0, 0] == -float("inf")


@pytest.mark.parametrize(
    "tensors",
    [
        {"topk_logits": torch.zeros(N, S, K)},
        {"topk_logits": torch.zeros(N, S, K), "topk_indices": torch.zeros(N, S, 5).long()},
        {"topk_logits": torch.zeros(N, S), "topk_indices": torch.zeros(N, S).long()},
        {"topk_logits": torch.zeros(N, 0, K), "topk_indices": torch.zeros(N, 0, K).long()},
        {"topk_logits": torch.zeros(N, S, K), "topk_indices": torch.zeros(N, S, K)},
        {"topk_logits": torch.zeros(N, S, K).double(), "topk_indices": torch.zeros(N, S, K).long()},
        {"topk_logits": [[[1.0]]], "topk_indices": torch.zeros(1, 1, 1).long()},
    ],
    ids=[
        "one is missing",
        "shapes differ",
        "two axes",
        "empty",
        "ids of floats",
        "doubles",
        "a list",
    ],
)
def test_a_payload_is_of_two_tensors_of_one_shape(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(PayloadInvalidError):
        put(tensors)


@pytest.mark.parametrize("rows", [(0,), (0, 0), (0, 0, 1), (0, -1), (0, 1, 2), (0, 1.0)])
def test_every_row_is_told_its_place_in_the_batch(rows: tuple[int, ...]) -> None:
    with pytest.raises(PayloadInvalidError, match=r"global index|from 0 on"):
        put(told(), rows=rows)


def test_a_replica_looks_at_its_tensors_and_puts_nothing() -> None:
    by = teacher(is_representative=False)

    assert by.put(told(), step=1, rows=range(N)).source is None
    draft = by.reserve(shape=(N, S, K), value_type=ElementType.FLOAT32, id_type=ElementType.INT64)
    for name, each in told().items():
        draft.tensors[name].copy_(each)
    assert draft.seal(step=1, rows=range(N)).source is None
    with pytest.raises(PayloadInvalidError):
        by.put(told(), step=1, rows=range(1))


def test_a_draft_is_written_in_place_and_sealed_once() -> None:
    by = teacher()
    draft = by.reserve(shape=(N, S, K), value_type=ElementType.FLOAT32, id_type=ElementType.INT32)
    for name, each in told().items():
        draft.tensors[name].copy_(each)
    answer = draft.seal(step=1, rows=range(N))

    assert isinstance(answer.source, FlatPayload)
    assert torch.equal(answer.source.views()["topk_logits"], told()["topk_logits"])
    with pytest.raises(PayloadInvalidError, match="reserve another"):
        draft.seal(step=1, rows=range(N))


def test_a_draft_that_was_not_written_whole_is_refused_at_its_seal() -> None:
    """Room is not cleared: here it is full of NaN."""
    draft = teacher().reserve(
        shape=(N, S, K), value_type=ElementType.FLOAT32, id_type=ElementType.INT32
    )
    with pytest.raises(PayloadInvalidError, match="NaN"):
        draft.seal(step=1, rows=range(N))


def test_a_students_batch_gets_the_trainers_keys() -> None:
    taken = batch()
    attach(taken, put(told(ids=torch.int32)), step=1, rows=range(N), top_k=K, vocabulary_size=24)

    ids = taken["teacher_topk_indices"]
    assert isinstance(ids, torch.Tensor)
    assert ids.dtype is torch.int64
    assert torch.equal(ids, told()["topk_indices"])


def test_copies_are_the_students_own() -> None:
    flat = put(told())
    taken = batch()
    attach(taken, flat, copy=True)
    values = taken["teacher_topk_logits"]
    assert isinstance(values, torch.Tensor)
    values += 1

    assert torch.equal(flat.views()["topk_logits"], told()["topk_logits"])


def test_a_callers_buffers_are_filled_and_converted() -> None:
    out = {
        "topk_logits": torch.zeros(N, S, K).bfloat16(),
        "topk_indices": torch.zeros(N, S, K).int(),
    }
    taken = batch()
    attach(taken, put(told()), out=out)

    assert taken["teacher_topk_logits"] is out["topk_logits"]
    assert torch.equal(out["topk_logits"], told()["topk_logits"].bfloat16())
    assert torch.equal(out["topk_indices"], told()["topk_indices"].int())


@pytest.mark.parametrize(
    "out",
    [
        {"topk_logits": torch.zeros(N, S, K)},
        {"topk_logits": torch.zeros(N, S, K), "topk_indices": torch.zeros(N, S, 9).long()},
        {"topk_logits": torch.zeros(N, S, K), "topk_indices": torch.zeros(N, S, K).half()},
        {"topk_logits": torch.zeros(N, S, K), "topk_indices": torch.zeros(N, S, K).to(torch.uint8)},
    ],
    ids=["one is missing", "another shape", "ids as floats", "ids too large"],
)
def test_buffers_that_do_not_hold_the_payload_are_refused(out: dict[str, torch.Tensor]) -> None:
    tensors = told()
    tensors["topk_indices"] *= 100

    with pytest.raises(PayloadInvalidError):
        attach(batch(), put(tensors), out=out)


@pytest.mark.parametrize("key", ["teacher_topk_logits", "teacher_topk_indices"])
def test_a_batch_that_has_been_filled_is_left_alone(key: str) -> None:
    taken = batch(**{key: 1})

    with pytest.raises(PayloadInvalidError, match="already"):
        attach(taken, put(told()))
    assert set(taken) == {"input_ids", key}


def test_no_payload_is_no_change() -> None:
    taken = batch()
    attach(taken, None)

    assert set(taken) == {"input_ids"}


@pytest.mark.parametrize("input_ids", [None, torch.zeros(N), [[0] * S] * N])
def test_a_batch_without_tokens_cannot_be_checked(input_ids: object) -> None:
    with pytest.raises(PayloadInvalidError, match="input_ids"):
        attach({"input_ids": input_ids}, put(told()))


@pytest.mark.parametrize(
    "tokens", [(N + 1, S), (N, S + 1)], ids=["another number of rows", "another length"]
)
def test_a_payload_is_of_the_batchs_own_rows_and_length(tokens: tuple[int, int]) -> None:
    with pytest.raises(PayloadInvalidError, match="are expected"):
        attach({"input_ids": torch.zeros(tokens)}, put(told()))


def test_something_else_than_a_payload_is_named() -> None:
    with pytest.raises(PayloadInvalidError, match="given dict"):
        attach(batch(), told())


TOKENS = torch.arange(N * S).view(N, S)
LENGTHS = torch.tensor([2, 3])


def test_tokens_are_compared_up_to_each_rows_length() -> None:
    flat = put(told(), input_ids=TOKENS, lengths=LENGTHS)
    assert flat.description.tokens is not None
    assert flat.description.tokens.digests == (row_digest([0, 1]), row_digest([3, 4, 5]))

    padded = TOKENS.clone()
    padded[0, 2] = 99
    attach({"input_ids": padded, "input_lengths": LENGTHS}, flat)
    attach({"input_ids": padded}, flat)
    other = TOKENS + torch.tensor([[0], [1]])
    with pytest.raises(AlignmentError, match="row 1 of the batch") as refusal:
        attach({"input_ids": other, "input_lengths": LENGTHS}, flat)
    assert refusal.value.facts["row"] == 1


def test_rows_of_another_length_are_refused() -> None:
    flat = put(told(), input_ids=TOKENS, lengths=LENGTHS)

    with pytest.raises(AlignmentError, match="has 3"):
        attach({"input_ids": TOKENS, "input_lengths": torch.tensor([3, 3])}, flat)


def test_a_teacher_without_lengths_is_compared_by_all_that_it_had() -> None:
    flat = put(told(), input_ids=TOKENS)

    attach({"input_ids": TOKENS, "input_lengths": LENGTHS}, flat)
    padded = TOKENS.clone()
    padded[0, 2] = 99
    with pytest.raises(AlignmentError):
        attach({"input_ids": padded, "input_lengths": LENGTHS}, flat)


@pytest.mark.parametrize("lengths", [[2], [2, 4], [-1, 2]])
def test_lengths_are_one_a_row_and_within_it(lengths: list[int]) -> None:
    with pytest.raises(PayloadInvalidError, match=r"one a row|the payload 3 positions|from 0 on"):
        put(told(), input_ids=TOKENS, lengths=torch.tensor(lengths))


@pytest.mark.parametrize("step", [1.0, "1", None, True])
def test_a_step_is_a_whole_number(step: object) -> None:
    with pytest.raises(PayloadInvalidError, match="whole number"):
        put(told(), step=step)


def test_a_tensor_with_a_gradient_leaves_none_behind() -> None:
    tensors = told()
    tensors["topk_logits"].requires_grad_()

    assert not put(tensors).views()["topk_logits"].requires_grad


def test_a_draft_is_discarded_at_the_end_of_its_block() -> None:
    by = teacher()
    with by.reserve(
        shape=(N, S, K), value_type=ElementType.FLOAT32, id_type=ElementType.INT32
    ) as draft:
        pass
    assert isinstance(by.room, OwnRoom)
    assert by.room.back == 1
    with pytest.raises(PayloadInvalidError, match="reserve another"):
        draft.seal(step=1, rows=range(N))


DESCRIBED = put(told()).description


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (Expected(step=2), "step 1 and step 2"),
        (Expected(rows=(1, 0)), "row 0 of the batch at place 0"),
        (Expected(rows=(0, 1, 2)), "2 rows of 3"),
        (Expected(row_count=3), "2 rows, and 3"),
        (Expected(sequence_length=4), "3 positions a row, and 4"),
        (Expected(top_k=5), "4 entries a position, and 5"),
        (Expected(vocabulary_size=23), "ids from 0 to 23"),
        (Expected(value_types=[ElementType.BFLOAT16]), "topk_logits of float32"),
        (Expected(id_types=[ElementType.INT32]), "topk_indices of int64"),
    ],
)
def test_what_differs_is_told_with_both_numbers(expected: Expected, said: str) -> None:
    with pytest.raises(PayloadInvalidError, match=said):
        check_description(DESCRIBED, expected)


def test_what_is_as_expected_passes() -> None:
    check_description(
        DESCRIBED,
        Expected(step=1, rows=(0, 1), row_count=2, sequence_length=3, top_k=4, vocabulary_size=24),
    )


def described(*columns: tuple[str, tuple[int, ...]]) -> PayloadDescription:
    return PayloadDescription(
        step=1,
        data_parallel_rank=0,
        rows=(0, 1),
        columns=tuple(
            FlatColumn(name=name, element_type=ElementType.INT64, shape=shape, offset_bytes=0)
            for name, shape in columns
        ),
    )


@pytest.mark.parametrize(
    "columns",
    [
        [("topk_logits", (N, S, K))],
        [("topk_logits", (N, S, K)), ("topk_ids", (N, S, K))],
        [("topk_logits", (N, S, K)), ("topk_indices", (N, S, 9))],
        [("topk_logits", (N, S)), ("topk_indices", (N, S))],
    ],
)
def test_a_description_of_something_else_is_refused(
    columns: list[tuple[str, tuple[int, ...]]],
) -> None:
    with pytest.raises(PayloadInvalidError, match="teacher rank 0"):
        check_description(described(*columns), Expected())


def test_a_buffer_that_ends_early_is_refused() -> None:
    flat = put(told())
    short = FlatPayload(description=flat.description, buffer=flat.buffer[:100])

    with pytest.raises(PayloadInvalidError, match="given as 100 bytes"):
        short.views()


def test_types_are_named_in_words_as_well() -> None:
    packed = put(told(), teacher(value_type="bfloat16", id_type="int32")).description

    assert [each.element_type for each in packed.columns] == [
        ElementType.BFLOAT16,
        ElementType.INT32,
    ]
    with pytest.raises(RequestInvalidError, match="value_type has 'half', which is none"):
        teacher(value_type="half")
