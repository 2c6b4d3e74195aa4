"""Rows to be scored: what is taken, and what is refused before anything is sent."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.digest import row_digest
from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.payloads.guards import next_ids
from teacher_logits_client.rows import RowBatch, make_row_batch

VOCABULARY = 100
ROWS = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9), min_size=1, max_size=6
)


def batch_of(input_ids: object, lengths: object = None, **given: object) -> RowBatch:
    return make_row_batch(
        input_ids,  # type: ignore[arg-type]
        lengths,  # type: ignore[arg-type]
        vocabulary_size=VOCABULARY,
        prefix_vocabulary_size=2 * VOCABULARY,
        **given,  # type: ignore[arg-type]
    )


def padded(rows: list[list[int]], padding: int) -> torch.Tensor:
    width = max(map(len, rows)) + 1
    return torch.tensor([row + [padding] * (width - len(row)) for row in rows])


@given(rows=ROWS, padding=st.integers(-(1 << 40), 1 << 40))
def test_a_rectangle_with_lengths_is_the_list_of_its_rows(
    rows: list[list[int]], padding: int
) -> None:
    rectangle = batch_of(padded(rows, padding), [len(row) for row in rows])
    jagged = batch_of(rows)

    for batch in (rectangle, jagged):
        flat = [token for row in rows for token in row]
        assert batch.ids_bytes == struct.pack(f"<{len(flat)}i", *flat)
        assert batch.rows.lengths.tolist() == [len(row) for row in rows]
        assert batch.digests == b"".join(row_digest(row) for row in rows)
        assert batch.position_count == batch.token_count == len(flat)


@given(rows=ROWS, data=st.data())
def test_the_next_ids_are_those_behind_the_wanted_positions(
    rows: list[list[int]], data: st.DataObject
) -> None:
    windows = []
    for row in rows:
        first = data.draw(st.integers(0, len(row)))
        windows.append([first, data.draw(st.integers(0, len(row) - first))])
    expected = [
        row[at + 1] if at + 1 < len(row) else -1
        for row, (first, count) in zip(rows, windows, strict=True)
        for at in range(first, first + count)
    ]

    assert next_ids(batch_of(rows, windows=windows)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_integers_of_any_width_are_taken(dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 2], [3, 4]])

    assert batch_of(ids.to(dtype)).ids_bytes == batch_of(ids).ids_bytes


def test_a_rectangle_without_lengths_is_all_rows() -> None:
    assert batch_of(torch.zeros(2, 3, dtype=torch.int64)).rows.lengths.tolist() == [3, 3]


def test_a_prefix_may_be_empty_and_use_the_teachers_own_vocabulary() -> None:
    batch = batch_of([[1], [2]], prefix_ids=[[150, 3], []])

    assert batch.prefix_bytes == struct.pack("<2i", 150, 3)
    assert (batch.token_count, batch.position_count) == (4, 2)
    assert batch.digests == row_digest([1]) + row_digest([2])


def test_what_the_caller_does_with_its_tensor_later_changes_nothing() -> None:
    ids = torch.tensor([[1, 2]], dtype=torch.int32)
    batch = batch_of(ids)
    ids.zero_()

    assert batch.rows.ids.tolist() == [1, 2]


BAD = [
    ("no rows", [], None, {}),
    ("no rows", torch.zeros(0, 3, dtype=torch.int64), None, {}),
    ("row 1 of 2 has length 0", [[1], []], None, {}),
    ("row 0 of 2 has length 0", torch.zeros(2, 3, dtype=torch.int64), [0, 3], {}),
    ("row 1 of 2 has length -1", torch.zeros(2, 3, dtype=torch.int64), [1, -1], {}),
    ("row 0 of 1 has length 0", torch.zeros(1, 0, dtype=torch.int64), None, {}),
    (
        "length 8156, and input_ids is 4200 wide",
        torch.zeros(1, 4200, dtype=torch.int64),
        [8156],
        {},
    ),
    (
        "2 rows and 3 lengths: give one length a row",
        torch.zeros(2, 3, dtype=torch.int64),
        [1, 2, 3],
        {},
    ),
    ("have their lengths", [[1], [2]], [1, 1], {}),
    (r"shape \(3,\).*of one row, \[input_ids\]", torch.zeros(3, dtype=torch.int64), None, {}),
    (r"its first is 7.*of one row, \[input_ids\]", [7, 8], None, {}),
    (r"prefix_ids is one list .*\[prefix\] \* N", [[1]], None, {"prefix_ids": [1, 2, 3]}),
    ("input_ids holds float64", np.zeros((1, 2)), None, {}),
    ("input_ids cannot be read", np.array([["text"]]), None, {}),
    (r"shape \(1, 1, 1\)", torch.zeros(1, 1, 1, dtype=torch.int64), None, {}),
    ("holds float32", torch.zeros(1, 1), None, {}),
    ("holds bool", torch.zeros(1, 1, dtype=torch.bool), None, {}),
    ("row 1 of input_ids holds float32", [[1], [1.5]], None, {}),
    ("row 0 of input_ids is no list", ["text"], None, {}),
    ("row 0 of input_ids is no list", [[1 << 70]], None, {}),
    (r"row 0 of input_ids has shape \(1, 1\)", [[[1]]], None, {}),
    ("row 1, position 2 of input_ids is 100", [[1], [1, 2, 100]], None, {}),
    ("row 0, position 0 of input_ids is -100", torch.tensor([[-100, 1]]), [2], {}),
    ("is 4294967296", torch.tensor([[1 << 32]]), None, {}),
    ("row 0, position 1 of prefix_ids is 200", [[1]], None, {"prefix_ids": [[1, 200]]}),
    ("prefix_ids has 1 rows and input_ids 2", [[1], [2]], None, {"prefix_ids": [[1]]}),
    ("without prefix_ids", [[1]], None, {"prefix_lengths": [1]}),
    (
        r"lengths has shape \(2, 3\).*a mask goes to attention_mask=",
        torch.zeros(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.bool),
        {},
    ),
    (r"lengths has shape \(\): give the true", torch.zeros(1, 3, dtype=torch.int64), 3, {}),
    ("lengths holds float32: give", torch.zeros(1, 3, dtype=torch.int64), [3.0], {}),
    (
        "row 0 of 1 has length -1, and a row of prefix_ids has at least 0",
        [[1]],
        None,
        {"prefix_ids": torch.ones(1, 1, dtype=torch.int64), "prefix_lengths": [-1]},
    ),
    ("lengths cannot be read", torch.zeros(1, 3, dtype=torch.int64), "3", {}),
    (
        "prefix_lengths holds float32",
        [[1]],
        None,
        {"prefix_ids": torch.ones(1, 1, dtype=torch.int64), "prefix_lengths": [1.0]},
    ),
    (r"is a dict: give batch\['input_ids'\]", {"input_ids": [[1]]}, None, {}),
    ("input_ids is a str", "text", None, {}),
    ("input_ids is a int", 7, None, {}),
    (r"windows has shape \(2,\)", [[1], [2]], None, {"windows": [0, 1]}),
    (r"windows has shape \(1, 2\)", [[1], [2]], None, {"windows": [[0, 1]]}),
    ("float32", [[1]], None, {"windows": [[0.0, 1.0]]}),
    ("windows cannot be read", [[1], [2]], None, {"windows": [[0, 1], [0]]}),
    (
        "row 1 wants 2 positions from 1 on, and has 2",
        [[1], [2, 3]],
        None,
        {"windows": [[0, 1], [1, 2]]},
    ),
    ("from -1 on", [[1]], None, {"windows": [[-1, 1]]}),
    ("wants -1 positions", [[1]], None, {"windows": [[1, -1]]}),
]


@given(rows=ROWS, padding=st.integers(0, VOCABULARY - 1))
def test_a_mask_of_tokens_says_what_lengths_say(rows: list[list[int]], padding: int) -> None:
    rectangle, lengths = padded(rows, padding), torch.tensor([len(row) for row in rows])
    mask = torch.arange(rectangle.shape[1]) < lengths[:, None]
    by_lengths = batch_of(rectangle, lengths)

    for given_mask in (mask, mask.long(), mask.numpy(), mask.tolist()):
        by_mask = batch_of(rectangle, attention_mask=given_mask)
        assert by_mask.digests == by_lengths.digests
        assert by_mask.rows.lengths.tolist() == lengths.tolist()


def test_an_array_of_numpy_is_taken_as_a_tensor_is() -> None:
    ids = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)
    ids.flags.writeable = False

    assert batch_of(ids, np.array([3, 2])).ids_bytes == struct.pack("<5i", 1, 2, 3, 4, 5)


MASKS = [
    ("row 1 of attention_mask is padded on the left: its ones start at position 1 of 3",
     [[1, 1, 0], [0, 1, 1]]),
    ("row 0 of attention_mask has a gap: its ones stop after position 0 and go on at 2",
     [[1, 0, 1], [1, 1, 1]]),
    ("pad on the right .* or pass a list of rows", [[0, 0, 1], [1, 1, 1]]),
    ("row 1 of 2 has length 0", [[1, 1, 1], [0, 0, 0]]),
    (r"has shape \(1, 3\) and input_ids \(2, 3\)", [[1, 1, 1]]),
    ("attention_mask holds int64 that is not 0 or 1", [[1, 1, 2], [1, 0, 0]]),
    ("attention_mask holds float32", [[1.0, 1, 1], [1, 0, 0]]),
    ("attention_mask cannot be read", [[1, 1], [1]]),
]  # fmt: skip


@pytest.mark.parametrize(("says", "mask"), MASKS, ids=[case[0] for case in MASKS])
def test_a_mask_that_would_shift_positions_is_refused(says: str, mask: object) -> None:
    with pytest.raises(PayloadInvalidError, match=says):
        batch_of(torch.ones(2, 3, dtype=torch.int64), attention_mask=mask)


def test_a_mask_stands_neither_beside_lengths_nor_beside_a_list() -> None:
    with pytest.raises(PayloadInvalidError, match="give one of them"):
        batch_of(torch.ones(1, 2, dtype=torch.int64), [2], attention_mask=[[1, 1]])
    with pytest.raises(PayloadInvalidError, match="have their lengths"):
        batch_of([[1, 2]], attention_mask=[[1, 1]])


@pytest.mark.parametrize(("says", "ids", "lengths", "given"), BAD, ids=[case[0] for case in BAD])
def test_bad_rows_are_refused_with_their_numbers(
    says: str, ids: object, lengths: object, given: dict[str, object]
) -> None:
    with pytest.raises(PayloadInvalidError, match=says):
        batch_of(ids, lengths, **given)


def test_the_numbers_of_a_refusal_are_facts() -> None:
    with pytest.raises(PayloadInvalidError) as caught:
        batch_of([[1, 2], [3, 4, 500]])

    assert caught.value.facts == {
        "row": 1,
        "position": 2,
        "token_id": 500,
        "vocabulary_size": VOCABULARY,
    }


@pytest.mark.parametrize("window", [[2**63 - 1, 1], [1, 2**63 - 1], [2**62, 2**62]])
def test_windows_that_wrap_a_machine_word_are_refused(window: list[int]) -> None:
    with pytest.raises(PayloadInvalidError, match="row 0 wants"):
        batch_of([[1, 2, 3]], windows=[window])
