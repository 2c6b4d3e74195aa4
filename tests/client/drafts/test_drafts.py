"""Drafts as such: in which forms rows, masks and logits may come, without a server."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.client.publishing.a_publisher import (
    ROWS,
    VOCABULARY,
    WIDTH,
    K,
    a_grid,
    a_teacher,
    expected,
    flat,
    next_of,
    some_rows,
)

import teacher_logits_client as tl
from teacher_logits.digest import row_digest
from teacher_logits.errors import AlignmentError, PayloadInvalidError, TeacherLogitsError
from teacher_logits.layout import ColumnKind
from teacher_logits.payload import Payload
from teacher_logits.payload_room import HostRoom
from teacher_logits.selection import Selection
from teacher_logits_client.drafts import Draft
from teacher_logits_client.drafts.checks import finish
from teacher_logits_client.drafts.columns import DraftColumns, describe
from teacher_logits_client.drafts.parts import DraftPart
from teacher_logits_client.drafts.rows import DraftRows, Given, make_draft_rows
from teacher_logits_client.publishing.publisher_rows import rows_of_step, rows_to_write

if TYPE_CHECKING:
    from teacher_logits_client.slabs.claims import Desk, Granted

TEACHER = a_teacher("teacher")


def rows_of(rows: range = range(ROWS), padded: int = ROWS, **given: object) -> DraftRows:
    values = dict.fromkeys(("input_ids", "lengths", "attention_mask", "windows", "loss_mask"))
    return make_draft_rows(TEACHER, rows, padded, Given(**{**values, **given}))  # type: ignore[arg-type]


def draft_of(rows: DraftRows) -> tuple[DraftPart, DraftColumns]:
    payload = describe(TEACHER, 0, rows)
    room = HostRoom(memoryview(bytearray(payload.size_bytes)))
    columns = DraftColumns(room.tensors(payload.columns), rows, temperatures=2)
    return part_of(rows, columns, payload), columns


def part_of(rows: DraftRows, columns: DraftColumns, payload: Payload) -> DraftPart:
    return DraftPart(
        rows.rows, draft_rows=rows, columns=columns, payload=payload, check_open=lambda: None
    )


def finished(rows: DraftRows, columns: DraftColumns) -> int:
    return finish(columns, rows, describe(TEACHER, 0, rows), mask=False)


def matches(columns: DraftColumns, wanted: object) -> bool:
    assert isinstance(wanted, Selection)
    got = columns.selection
    kept = {name: value for name, value in vars(wanted).items() if value is not None}
    return all(torch.equal(getattr(got, name), value) for name, value in kept.items())


def test_a_list_of_rows_and_a_rectangle_are_the_same_rows() -> None:
    ids, lengths, _ = some_rows(0)
    ragged = [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]
    a, b = rows_of(input_ids=ids, lengths=lengths), rows_of(input_ids=ragged)
    mask = torch.arange(WIDTH) < lengths[:, None]
    c = rows_of(input_ids=ids.numpy(), attention_mask=mask)
    assert a.digests == b.digests == c.digests
    assert a.digests[:16] == row_digest(ragged[0])
    assert a.width == b.width == c.width == WIDTH
    assert a.next_ids is not None
    assert a.next_ids.tolist() == next_of(ids, lengths).tolist()


@pytest.mark.parametrize("form", ["flat", "rectangle", "padded rows"])
def test_logits_come_flat_or_as_a_rectangle(form: str) -> None:
    ids, lengths, logits = some_rows(1)
    wanted = expected(ids, lengths, logits)
    rows = rows_of(input_ids=ids, lengths=lengths)
    if form == "flat":
        logits = flat(logits, lengths)
    elif form == "padded rows":
        rows = rows_of(range(ROWS - 1), ROWS, input_ids=ids, lengths=lengths)
        wanted = expected(ids[:-1], lengths[:-1], logits[:-1])
    part, columns = draft_of(rows)
    tl.select_top_k(logits, out=part)
    assert matches(columns, wanted)
    assert finished(rows, columns) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=ROWS, max_size=ROWS))
def test_windows_are_cut_out_of_every_form(cuts: list[tuple[int, int]]) -> None:
    ids, lengths, logits = some_rows(2)
    windows = [
        (min(first, length), min(count, length - min(first, length)))
        for (first, count), length in zip(cuts, lengths.tolist(), strict=True)
    ]
    rows = rows_of(input_ids=ids, lengths=lengths, windows=windows)
    pieces = [logits[row, a : a + n] for row, (a, n) in enumerate(windows)]
    following = torch.split(next_of(ids, lengths), lengths.tolist())
    wanted = tl.select_top_k(
        torch.cat(pieces),
        k=K,
        temperatures=(1.0, 2.0),
        vocab_size=VOCABULARY,
        next_ids=torch.cat([following[row][a : a + n] for row, (a, n) in enumerate(windows)]),
    )
    for given_logits in (logits, flat(logits, lengths), torch.cat(pieces)):
        part, columns = draft_of(rows)
        tl.select_top_k(given_logits, out=part)
        assert matches(columns, wanted)


def test_a_rectangle_is_not_copied() -> None:
    ids, lengths, logits = some_rows(1)
    part, _ = draft_of(rows_of(input_ids=ids, lengths=lengths))
    begin, end = logits.data_ptr(), logits.data_ptr() + logits.nbytes
    for index, _ in part._pieces(logits, what="logits", axes=1):
        assert begin <= logits[index].data_ptr() < end


def test_next_ids_may_be_said_in_the_form_of_the_logits() -> None:
    ids, lengths, logits = some_rows(1)
    rectangle = torch.full((ROWS, WIDTH), -1)
    rectangle[:, :-1] = ids[:, 1:]
    rectangle[torch.arange(ROWS), lengths - 1] = -1
    part, columns = draft_of(rows_of(lengths=lengths.tolist()))
    with pytest.raises(PayloadInvalidError, match=f"are {max(lengths.tolist())} wide|next"):
        tl.select_top_k(logits, out=part)
    tl.select_top_k(logits, out=part, next_ids=rectangle)
    assert matches(columns, expected(ids, lengths, logits))


def test_logits_of_other_rows_are_refused() -> None:
    ids, lengths, logits = some_rows(1)
    part, _ = draft_of(rows_of(input_ids=ids, lengths=lengths))
    for wrong in (logits[:3], logits[:, :-1], flat(logits, lengths)[:-1], logits.unsqueeze(0)):
        with pytest.raises(PayloadInvalidError, match="logits have shape"):
            tl.select_top_k(wrong, out=part)
    with pytest.raises(PayloadInvalidError, match="columns"):
        tl.select_top_k(logits[..., :9], out=part)


def test_a_column_of_another_width_or_name_is_refused() -> None:
    ids, lengths, _ = some_rows(1)
    part, _ = draft_of(rows_of(input_ids=ids, lengths=lengths))
    count = part.position_count
    with pytest.raises(PayloadInvalidError, match="has 3 entries a position, and the payload 6"):
        part.write(topk_ids=torch.zeros(count, 3, dtype=torch.int32))
    with pytest.raises(PayloadInvalidError, match="no column"):
        part.write(row_status=torch.zeros(count))


@pytest.mark.parametrize("left_out", ["topk_ids", "log_tail", "logsumexp", "actual_logprob"])
def test_each_column_that_was_not_written_is_named(left_out: str) -> None:
    ids, lengths, logits = some_rows(1)
    rows = rows_of(input_ids=ids, lengths=lengths)
    part, columns = draft_of(rows)
    values = vars(expected(ids, lengths, logits))
    part.write(**{k: v for k, v in values.items() if k not in ("status", left_out)})
    with pytest.raises(PayloadInvalidError, match=f"{left_out} was not written") as raised:
        finished(rows, columns)
    assert raised.value.facts["position"] == 0


def test_marks_and_counts_of_a_mask_are_counted_alike() -> None:
    ids, lengths, _ = some_rows(3)
    mask = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)) < 0.5
    each = [
        int(row[: length - 1].sum()) for row, length in zip(mask, lengths.tolist(), strict=True)
    ]
    ragged = [row[:length].tolist() for row, length in zip(mask, lengths.tolist(), strict=True)]
    for given_mask in (mask, mask.int(), mask.float(), ragged, each, torch.tensor(each)):
        rows = rows_of(input_ids=ids, lengths=lengths, loss_mask=given_mask)
        assert rows.valid_count == sum(each)


def test_a_mask_that_cannot_be_is_refused() -> None:
    ids, lengths, _ = some_rows(3)
    for mask, words in (
        (torch.ones(ROWS, WIDTH + 1), "wide"),
        (lengths, "count"),
        (torch.ones(ROWS, dtype=torch.bool), "give marks"),
        ([[True]] * ROWS, "the row"),
        ("abcd", "is a str"),
        (5, "give integers"),
        (["a"] * ROWS, "cannot be read"),
        ([None] * ROWS, "cannot be read"),
        ([True] * ROWS, "of bool"),
        (torch.ones(ROWS, WIDTH, device="meta"), "cannot be read"),
        *((torch.full((ROWS, WIDTH), mark), "give 1 where") for mark in (torch.nan, 0.5, -1.0)),
        ([[0.5] * length for length in lengths.tolist()], "give 1 where"),
        (torch.ones(ROWS + 1, WIDTH), "give one for each"),
    ):
        with pytest.raises(PayloadInvalidError, match=words):
            rows_of(input_ids=ids, lengths=lengths, loss_mask=mask)


def test_rows_longer_than_the_teacher_promises_are_refused() -> None:
    with pytest.raises(PayloadInvalidError, match="promises 64 at most"):
        rows_of(range(1), 1, input_ids=[[1] * 65])
    with pytest.raises(PayloadInvalidError, match="1 to 64"):
        rows_of(range(1), 1, lengths=[65])
    endless = a_teacher("t", max_row_tokens=1 << 40)
    given_rows = Given(
        input_ids=None, lengths=[1 << 31], attention_mask=None, windows=None, loss_mask=None
    )
    with pytest.raises(PayloadInvalidError, match="1 to 2147483647"):
        make_draft_rows(endless, range(1), 1, given_rows)


def test_a_rank_of_padding_publishes_nothing() -> None:
    teacher = a_teacher("t", batch_grid=a_grid(2), data_parallel_rank=1)
    assert rows_to_write(teacher, None, real_rows=3) == (range(2, 3), 2)
    with pytest.raises(PayloadInvalidError, match="publishes nothing"):
        rows_to_write(teacher, None, real_rows=2)
    assert rows_of_step(teacher, real_rows=3) == range(2, 3)
    assert not rows_of_step(teacher, real_rows=2)


def test_columns_that_a_profile_leaves_out_are_not_written() -> None:
    few = a_teacher("t", columns=[k for k in TEACHER.columns if k.value != "actual_logprob"])
    ids, lengths, logits = some_rows(1)
    rows = rows_of(lengths=lengths)
    payload = describe(few, 0, rows)
    room = HostRoom(memoryview(bytearray(payload.size_bytes)))
    columns = DraftColumns(room.tensors(payload.columns), rows, temperatures=2)
    part = part_of(rows, columns, payload)
    tl.select_top_k(logits, out=part)
    assert finish(columns, rows, payload, mask=False) == 0
    wanted = cast("Selection", expected(ids, lengths, logits))
    assert torch.equal(columns.selection.topk_ids, wanted.topk_ids)
    with pytest.raises(PayloadInvalidError, match="logits"):
        describe(a_teacher("t", columns=("logits", *TEACHER.columns)), 0, rows)


def selected(rows: DraftRows) -> tuple[DraftPart, DraftColumns]:
    part, columns = draft_of(rows)
    part.select(some_rows(1)[2])
    return part, columns


def test_what_was_selected_is_known_without_a_look_at_its_bytes() -> None:
    ids, lengths, _ = some_rows(1)
    rows = rows_of(input_ids=ids, lengths=lengths)
    _, columns = selected(rows)
    columns.by_kind[ColumnKind.TOPK_IDS].fill_(-7)  # behind its back: nobody looks
    assert finished(rows, columns) == 0


def test_bad_rows_of_a_selection_are_found_as_it_is_written() -> None:
    ids, lengths, logits = some_rows(1)
    rows = rows_of(input_ids=ids, lengths=lengths)
    part, columns = draft_of(rows)
    logits[1, 0, 0] = torch.nan
    part.select(logits)
    with pytest.raises(PayloadInvalidError) as caught:
        finished(rows, columns)
    assert (caught.value.facts["row"], caught.value.facts["position"]) == (1, 0)


@pytest.mark.parametrize("way", ["write", "columns", "selection"])
def test_what_is_written_by_hand_after_a_check_is_looked_at_anew(way: str) -> None:
    ids, lengths, _ = some_rows(1)
    rows = rows_of(input_ids=ids, lengths=lengths)
    part, _ = selected(rows)
    good = {name: values.clone() for name, values in part.columns.items()}
    part, columns = draft_of(rows)
    part.write(**good)
    assert finished(rows, columns) == columns.bad_row_count == 0
    ids_of_all = good["topk_ids"]
    ids_of_all[0] = VOCABULARY + 1
    if way == "write":
        part.write(topk_ids=ids_of_all)
    elif way == "columns":
        part.columns["topk_ids"].copy_(ids_of_all)
    else:
        part.selection.topk_ids.copy_(ids_of_all)
    assert columns.bad_row_count is None
    with pytest.raises(PayloadInvalidError):
        finished(rows, columns)


@pytest.mark.parametrize("window", [[2**63 - 1, 1], [1, 2**63 - 1], [2**62, 2**62], [2**31, 1]])
@pytest.mark.parametrize("with_ids", [True, False])
def test_windows_that_wrap_a_machine_word_are_refused(window: list[int], with_ids: bool) -> None:
    ids, lengths, _ = some_rows(1)
    with pytest.raises(PayloadInvalidError, match="row 0"):
        rows_of(input_ids=ids if with_ids else None, lengths=lengths, windows=[window] * ROWS)


def written_by_hand(
    change: str = "", at: int = 0, to: float = 0.0
) -> tuple[DraftRows, DraftColumns]:
    """A draft of columns that a teacher had, one of them changed at a position."""
    ids, lengths, logits = some_rows(1)
    rows = rows_of(input_ids=ids, lengths=lengths)
    part, columns = draft_of(rows)
    values = {k: v for k, v in vars(expected(ids, lengths, logits)).items() if k != "status"}
    if change:
        values[change][at] = to
    part.write(**values)
    return rows, columns


def test_what_comes_after_a_rows_last_position_is_zero() -> None:
    assert finished(*written_by_hand()) == 0
    with pytest.raises(PayloadInvalidError, match="its last") as caught:
        finished(*written_by_hand("actual_logprob", WIDTH - 1, -3.0))
    assert (caught.value.facts["row"], caught.value.facts["position"]) == (0, WIDTH - 1)


def test_zeros_for_the_next_tokens_are_found_before_anybody_reads_them() -> None:
    rows, columns = written_by_hand()
    columns.selection.actual_logprob.zero_()  # type: ignore[union-attr]
    columns.touched.fill_(True)

    with pytest.raises(AlignmentError, match=r"row 0, position 0: .*is said to be 0\.0000"):
        finished(rows, columns)


def test_where_no_token_ids_were_given_nobody_knows_what_comes_next() -> None:
    ids, lengths, logits = some_rows(1)
    rows = rows_of(lengths=lengths)
    part, columns = draft_of(rows)
    values = {k: v for k, v in vars(expected(ids, lengths, logits)).items() if k != "status"}
    values["actual_logprob"] = torch.zeros_like(values["actual_logprob"])
    part.write(**values)

    assert finished(rows, columns) == 0


@pytest.mark.parametrize("column", ["topk_logprobs", "log_tail", "actual_logprob"])
def test_no_log_probability_by_hand_is_above_0(column: str) -> None:
    with pytest.raises(PayloadInvalidError, match="above 0"):
        finished(*written_by_hand(column, 3, 0.01))


@pytest.mark.parametrize("is_before", [True, False])
def test_views_beside_a_selection_have_all_of_it_looked_at(is_before: bool) -> None:
    ids, lengths, logits = some_rows(1)
    rows = rows_of(input_ids=ids, lengths=lengths)
    part, columns = draft_of(rows)
    views = part.columns if is_before else {}
    part.select(logits)
    (views or part.columns)["topk_ids"][3] = 7
    with pytest.raises(PayloadInvalidError, match="twice"):
        finished(rows, columns)


@pytest.mark.parametrize(
    ("column", "shape", "value", "words"),
    [
        ("topk_ids", (K,), torch.tensor(2**32 + 7), "no place"),
        ("topk_ids", (K,), torch.tensor(-(2**40)), "no place"),
        ("topk_ids", (K,), torch.tensor(7.9), "give integers"),
        ("topk_ids", (K,), torch.tensor(True), "give integers"),
        ("log_tail", (2,), torch.tensor(-1e300, dtype=torch.float64), "no place"),
        ("log_tail", (2,), torch.tensor(-1), "give floats"),
        ("log_tail", (2,), torch.tensor(-1j), "give floats"),
        ("log_tail", (2,), torch.tensor(-1.0, device="meta"), "meta device"),
    ],
)
def test_values_that_a_column_cannot_hold_are_refused(
    column: str, shape: tuple[int, ...], value: torch.Tensor, words: str
) -> None:
    ids, lengths, _ = some_rows(1)
    part, _ = draft_of(rows_of(input_ids=ids, lengths=lengths))
    with pytest.raises(PayloadInvalidError, match=words):
        part.write(**{column: value.expand(part.position_count, *shape)})


@pytest.mark.parametrize("column", ["log_tail", "logsumexp", "topk_ids"])
def test_a_column_without_its_last_axis_is_told_that_axis(column: str) -> None:
    ids, lengths, _ = some_rows(1)
    part, _ = draft_of(rows_of(input_ids=ids, lengths=lengths))
    held = part.columns[column]
    with pytest.raises(PayloadInvalidError, match=rf"give \[\.\.\., {held.shape[-1]}\]"):
        part.write(**{column: torch.zeros(part.position_count, dtype=held.dtype)})


def test_wider_types_of_values_that_fit_are_taken() -> None:
    ids, lengths, logits = some_rows(1)
    wanted = cast("Selection", expected(ids, lengths, logits))
    part, columns = draft_of(rows_of(input_ids=ids, lengths=lengths))
    part.write(topk_ids=wanted.topk_ids.long(), topk_logprobs=wanted.topk_logprobs.double())
    assert torch.equal(columns.selection.topk_ids, wanted.topk_ids)
    assert torch.equal(columns.selection.topk_logprobs, wanted.topk_logprobs)


def test_what_is_no_tensor_is_refused() -> None:
    ids, lengths, logits = some_rows(1)
    part, _ = draft_of(rows_of(input_ids=ids, lengths=lengths))
    wrong: tuple[object, ...] = (None, logits.numpy(), [[1.0]], logits.to("meta"))
    for each in wrong:
        with pytest.raises(PayloadInvalidError, match="give a dense"):
            tl.select_top_k(each, out=part)  # type: ignore[call-overload]
    for column in ([[1]], ids.numpy()):
        with pytest.raises(PayloadInvalidError, match="give a dense"):
            part.write(topk_ids=column)  # type: ignore[arg-type]
    with pytest.raises(PayloadInvalidError, match="next_ids is a list"):
        part.select(logits, next_ids=[1])  # type: ignore[arg-type]


def test_parts_and_micro_batches_that_cannot_be_are_refused() -> None:
    rows = rows_of(lengths=[3] * ROWS)
    wrong: tuple[object, ...] = (None, 3, [0], slice(0, 1), range(0), range(0, 5), range(1, 3, 2))
    for part in wrong:
        with pytest.raises(PayloadInvalidError, match="give a range among rows 0 to 3"):
            rows.part(part)
    for size in (0, -1, 1.5, "a", True, None):
        with pytest.raises(PayloadInvalidError, match="a micro batch of"):
            rows.micro_batches(size)
    assert rows.micro_batches(3) == [range(3), range(3, 4)]


def test_a_rank_that_is_no_number_is_refused() -> None:
    with pytest.raises(TeacherLogitsError, match=r"data_parallel_rank is True.* a whole number"):
        a_teacher("t", batch_grid=a_grid(2), data_parallel_rank=True)


def test_a_selection_that_was_interrupted_over_another_is_looked_at_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, lengths, logits = some_rows(1)
    rows = rows_of(input_ids=ids, lengths=lengths)
    part, columns = selected(rows)

    def interrupted(out: Selection, *_: object, **__: object) -> None:
        out.topk_ids[3] = 7
        raise KeyboardInterrupt

    monkeypatch.setattr("teacher_logits_client.drafts.parts.select_own", interrupted)
    with pytest.raises(KeyboardInterrupt):
        part.select(logits)
    with pytest.raises(PayloadInvalidError, match="twice"):
        finished(rows, columns)


def test_a_draft_that_could_not_be_made_goes_in_silence() -> None:
    class Room:
        def tensors(self, columns: object) -> None:
            raise MemoryError

    rows = rows_of(input_ids=some_rows(0)[0])
    with pytest.raises(MemoryError):
        Draft(
            cast("Granted", SimpleNamespace(room=Room())),
            payload=describe(TEACHER, 0, rows),
            rows=rows,
            micro_batch_size=1,
            mask_bad_rows=False,
            desk=cast("Desk", SimpleNamespace(is_here=lambda: True)),
            owner=None,
        )
