"""Columns where a publisher's own tensors lie: what is placed, and what is refused."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ALIGNMENT_BYTES, Column, ElementType, is_on_device, top_k_columns
from teacher_logits.pool import PAGE_BYTES
from teacher_logits.tensors import DTYPES
from teacher_logits_client.slabs.placed_columns import PlacedColumns, Registered, place_columns

POSITIONS, K = 6, 3
PROMISED, _ = top_k_columns(
    row_count=2,
    position_count=POSITIONS,
    top_k=K,
    temperature_count=1,
    value_type=ElementType.BFLOAT16,
)
OVER_POSITIONS = [column for column in PROMISED if is_on_device(column.kind)]
BUFFER_BYTES = 64 * PAGE_BYTES
ROW_ROOM = 4 * PAGE_BYTES


class Storage:
    """A buffer that was registered, and tensors over it."""

    def __init__(self, size_bytes: int = BUFFER_BYTES) -> None:
        # One alignment more, so that the buffer can begin at one.
        whole = torch.zeros(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8)
        start = -whole.data_ptr() % ALIGNMENT_BYTES
        self.bytes = whole[start : start + size_bytes]

    @property
    def registered(self) -> Registered:
        return Registered(
            slab_id="own",
            address=self.bytes.data_ptr(),
            size_bytes=len(self.bytes),
            room_bytes=len(self.bytes) + ROW_ROOM,
        )

    def tensor(self, column: Column, offset_bytes: int) -> torch.Tensor:
        flat = self.bytes[offset_bytes : offset_bytes + column.size_bytes]
        return flat.view(DTYPES[column.element_type]).view(column.shape)

    def place(self, offsets: dict[str, int]) -> PlacedColumns:
        tensors = {
            column.kind.value: self.tensor(column, offsets[column.kind.value])
            for column in OVER_POSITIONS
        }
        return place_columns(PROMISED, tensors, [self.registered])


@given(
    order=st.permutations(OVER_POSITIONS),
    gaps=st.lists(st.integers(0, 40), min_size=len(OVER_POSITIONS), max_size=len(OVER_POSITIONS)),
)
def test_columns_are_placed_where_their_tensors_lie(order: list[Column], gaps: list[int]) -> None:
    offsets, at = {}, 0
    for column, gap in zip(order, gaps, strict=True):
        at += gap * ALIGNMENT_BYTES
        offsets[column.kind.value] = at
        at += math.ceil(column.size_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    placed = Storage().place(offsets)
    by_name = {column.kind.value: column for column in placed.columns}
    for name, offset in offsets.items():
        assert placed.place.offset_bytes + by_name[name].offset_bytes == offset
    ends = [0]
    for column in placed.columns:
        assert column.offset_bytes >= ends[-1]
        assert column.offset_bytes % ALIGNMENT_BYTES == 0
        ends.append(column.end_bytes)
    assert {column.kind for column in placed.columns} == {column.kind for column in PROMISED}
    assert ends[-1] <= placed.size_bytes <= placed.place.size_bytes
    assert placed.place.offset_bytes % PAGE_BYTES == 0 == placed.place.size_bytes % PAGE_BYTES


def spread(storage: Storage) -> dict[str, torch.Tensor]:
    return {
        column.kind.value: storage.tensor(column, index * PAGE_BYTES)
        for index, column in enumerate(OVER_POSITIONS)
    }


def test_a_rectangle_of_as_many_positions_will_do() -> None:
    storage = Storage()
    tensors = spread(storage)
    tensors["topk_ids"] = tensors["topk_ids"].view(2, 3, K)
    place_columns(PROMISED, tensors, [storage.registered])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "log_tail"}, "give just these"),
        (lambda t: {**t, "row_offsets": torch.zeros(3)}, "give just these"),
        (lambda t: {**t, "topk_ids": t["topk_ids"].long()}, "int64"),
        (lambda t: {**t, "topk_ids": t["topk_ids"][:-1]}, r"\(5, 3\)"),
        (lambda t: {**t, "topk_ids": t["topk_ids"].view(3, 6).t()}, "contiguous"),
        (lambda t: {**t, "log_tail": torch.zeros(POSITIONS, 1)}, "register the buffer"),
        (
            lambda t: {**t, "topk_ids": torch.zeros(2, 4, K, dtype=torch.int32)},
            r"2 rows of 4 are 8 positions, and the payload has 6: padding has no place here",
        ),
        (list, "a list: give a mapping"),
        (lambda t: {**t, "log_tail": t["log_tail"].numpy()}, "ndarray under 'log_tail'"),
        (lambda t: {**t, 7: t["log_tail"]}, "under 7"),
    ],
)
def test_tensors_that_are_not_what_was_promised_are_refused(change, says) -> None:  # type: ignore[no-untyped-def]
    storage = Storage()
    with pytest.raises(PayloadInvalidError, match=says):
        place_columns(PROMISED, change(spread(storage)), [storage.registered])


def test_a_column_begins_at_a_multiple_of_the_alignment() -> None:
    storage = Storage()
    offsets = {c.kind.value: index * PAGE_BYTES for index, c in enumerate(OVER_POSITIONS)}
    offsets["log_tail"] += 4
    with pytest.raises(PayloadInvalidError, match="multiple of 256"):
        storage.place(offsets)


def test_columns_that_overlap_are_refused() -> None:
    storage = Storage()
    offsets = {c.kind.value: index * PAGE_BYTES for index, c in enumerate(OVER_POSITIONS)}
    offsets["topk_logprobs"] = offsets["topk_ids"]
    with pytest.raises(PayloadInvalidError, match=r"inside topk_(ids|logprobs)"):
        storage.place(offsets)


def test_the_rows_columns_need_room_behind_the_last_tensor() -> None:
    storage = Storage(len(OVER_POSITIONS) * PAGE_BYTES)
    tight = Registered(
        slab_id="own",
        address=storage.registered.address,
        size_bytes=storage.registered.size_bytes,
        room_bytes=(len(OVER_POSITIONS) - 1) * PAGE_BYTES,
    )
    with pytest.raises(PayloadInvalidError, match="bytes more behind its last tensor"):
        place_columns(PROMISED, spread(storage), [tight])
