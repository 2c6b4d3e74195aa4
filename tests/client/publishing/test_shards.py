"""Tensor- and context-parallel teachers: ranks publish parts, and students read whole rows."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.publishing.sharded import (
    GRID,
    LENGTHS,
    ROWS,
    WIDTH,
    a_student,
    ids_of,
    logits_of,
    opened,
    own_logits,
    publish,
    publish_row_by_row,
    ranks,
    reserve,
    whole_teacher,
)

import teacher_logits_client as tl
from teacher_logits.errors import (
    AlignmentError,
    DeadlinePassedError,
    PayloadConflictError,
    PayloadInvalidError,
    SessionRefusedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_client.payloads.batch import Batch

MASK = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 > 0
ROUNDED = ("log_tail", "logsumexp", "actual_logprob")
"""What a merge gives up to the rounding of fp32 normalisers."""
CUTS = [
    (("zigzag",), 1, 3, "shared_memory"),
    (("sequence",), 1, 2, "shared_memory"),
    (("vocabulary",), 3, 1, "shared_memory"),
    (("zigzag", "vocabulary"), 2, 2, "shared_memory"),
    (("zigzag", "vocabulary"), 2, 2, "stream"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[tl.Client]:
    with tl.testing.serve(pool_size="32MiB") as server, tl.connect(server.address) as opened_here:
        yield opened_here


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    text = str(request.node.name)
    return "".join(each if each.isalnum() else "-" for each in text).strip("-")[:100]


def taken(batch: Batch | tl.MicroBatch) -> dict[str, torch.Tensor]:
    return {kind: column.clone() for kind, column in batch.columns.items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for kind in wanted:
        if kind in ROUNDED:
            torch.testing.assert_close(found[kind], wanted[kind], rtol=2e-6, atol=2e-6)
        else:
            assert torch.equal(found[kind], wanted[kind]), kind


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """What a student reads of a step: all rows, and each micro batch."""

    columns: dict[str, torch.Tensor]
    micro: list[dict[str, torch.Tensor]]
    at_two: torch.Tensor
    count: int | None

    @classmethod
    def of(cls, session: tl.Session, step: int) -> Read:
        with session.acquire(
            step=step, input_ids=ids_of(step), lengths=LENGTHS, timeout=20
        ) as batch:
            assert {check.verdict.value for check in batch.checks} == {"passed"}
            return cls(
                columns=taken(batch),
                micro=[taken(each) for each in batch.micro_batches()],
                at_two=batch.targets_at(2.0).topk_logprobs.clone(),
                count=batch.global_count,
            )


@pytest.fixture(scope="module")
def whole(client: tl.Client) -> list[Read]:
    """What is read of each of two steps where one rank publishes all."""
    teacher, student = whole_teacher("whole"), a_student("whole")
    with opened(client, [teacher]) as publishers, client.open_session(student) as session:
        for step in range(2):
            publish(publishers, step, logits_of(step), loss_mask=MASK)
        return [Read.of(session, step) for step in range(2)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_students_read_what_one_rank_would_have_published(
    client: tl.Client, name: str, whole: list[Read], cut: tuple[tuple[str, ...], int, int, str]
) -> None:
    sharded_by, tensor, context, way = cut
    profiles = ranks(whole_teacher(name), *sharded_by, tensor=tensor, context=context)
    with (
        opened(client, profiles, transports=(way,)) as publishers,
        client.open_session(a_student(name)) as session,
    ):
        publish(publishers, 0, logits_of(0), loss_mask=MASK)
        found = Read.of(session, 0)

    assert [publisher.shard for publisher in publishers] == list(range(tensor * context))
    assert found.count == whole[0].count
    assert_same(found.columns, whole[0].columns)
    for own, wanted in zip(found.micro, whole[0].micro, strict=True):
        assert_same(own, wanted)
    torch.testing.assert_close(found.at_two, whole[0].at_two, rtol=2e-6, atol=2e-6)


def test_a_student_that_waits_gets_each_step_with_its_last_part(
    client: tl.Client, name: str, whole: list[Read]
) -> None:
    profiles = ranks(whole_teacher(name), "zigzag", "vocabulary", tensor=2, context=2)
    with (
        opened(client, profiles) as publishers,
        client.open_session(a_student(name)) as session,
    ):
        for step in range(2):  # the second is announced before it is sealed
            writer = threading.Thread(target=publish, args=(publishers, step, logits_of(step)))
            writer.start()
            found = Read.of(session, step)
            writer.join()
            assert_same(found.columns, whole[step].columns)


def test_a_step_that_is_announced_is_read_with_the_statuses_of_its_seals(
    client: tl.Client, name: str
) -> None:
    profiles = ranks(whole_teacher(name), "zigzag", context=2)
    logits = logits_of(1)
    logits[3, 0, 0] = torch.nan
    with (
        opened(client, profiles) as publishers,
        client.open_session(a_student(name)) as session,
    ):
        publish(publishers, 0, logits_of(0))
        with session.acquire(step=0, timeout=20):
            pass  # the next one is wanted now
        with ExitStack() as stack:
            for publisher in publishers:
                draft = stack.enter_context(reserve(publisher, 1, bad_rows="mask"))
                tl.select_top_k(own_logits(publisher.profile, logits), out=draft)
        with session.acquire(step=1, timeout=20) as batch:
            columns = batch.columns
            assert columns["row_status"].tolist() == [0, 0, 0, 1]
            start = int(columns["row_offsets"][3])
            assert bool((columns["topk_ids"][start:] == -1).all())
            assert bool((columns["topk_ids"][:start] >= 0).any(1).all())
            del columns


@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_each_rank_of_a_student_reads_its_own_rows_of_all_parts(
    client: tl.Client, name: str, way: str, whole: list[Read]
) -> None:
    wanted = whole[0].columns
    offsets = wanted["row_offsets"].tolist()
    profiles = ranks(whole_teacher(name), "zigzag", "vocabulary", tensor=2, context=2)
    student = a_student(name, transports=(way,))
    grid = replace(GRID, data_parallel_size=2, micro_batch_size=1)
    with opened(client, profiles) as publishers, ExitStack() as stack:
        sessions = [
            stack.enter_context(
                client.open_session(replace(student, batch_grid=grid, data_parallel_rank=rank))
            )
            for rank in range(2)
        ]
        publish_row_by_row(publishers, 0, logits_of(0))
        for rank, session in enumerate(sessions):
            rows = slice(2 * rank, 2 * rank + 2)
            positions = slice(offsets[rows.start], offsets[rows.stop])
            with session.acquire(
                step=0, input_ids=ids_of(0)[rows], lengths=LENGTHS[rows], timeout=20
            ) as batch:
                assert torch.equal(batch.columns["topk_ids"], wanted["topk_ids"][positions])
                assert torch.equal(batch.columns["row_windows"], wanted["row_windows"][rows])


def test_the_last_batch_may_be_partial_for_all_parts_alike(client: tl.Client, name: str) -> None:
    profiles = ranks(whole_teacher(name), "sequence", context=2)
    with (
        opened(client, profiles) as publishers,
        client.open_session(a_student(name)) as session,
    ):
        publish(publishers, 0, logits_of(0), real_rows=3)
        with session.acquire(step=0, input_ids=ids_of(0), lengths=LENGTHS, timeout=20) as batch:
            assert (batch.row_count, batch.real_row_count) == (4, 3)
            assert batch.columns["row_offsets"].tolist() == [0, 12, 15, 22, 22]


@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_rows_so_short_that_a_rank_holds_nothing_of_them_are_views_of_the_other(
    client: tl.Client, name: str, way: str
) -> None:
    lengths = torch.tensor([3, 1, 6, 2])
    profiles = ranks(whole_teacher(name), "sequence", context=2)
    student = a_student(name, transports=(way,))
    with opened(client, profiles) as publishers, client.open_session(student) as session:
        publish(publishers, 0, logits_of(0), lengths=lengths)
        with session.acquire(step=0, input_ids=ids_of(0), lengths=lengths, timeout=20) as batch:
            assert not batch.copied
            assert batch.columns["row_offsets"].diff().tolist() == lengths.tolist()
            assert bool((batch.columns["topk_ids"] >= 0).all())
            assert batch.targets.topk_logprobs.shape == (12, 5)


def test_who_waits_for_a_part_that_does_not_come_is_told_which(
    client: tl.Client, name: str
) -> None:
    profiles = ranks(whole_teacher(name), "zigzag", "vocabulary", tensor=2, context=2)
    with (
        opened(client, profiles) as publishers,
        client.open_session(a_student(name)) as session,
    ):
        publish(publishers[:3], 0, logits_of(0))
        with pytest.raises(DeadlinePassedError) as late:
            session.acquire(step=0, timeout=0.2)

        assert (
            "not reserved: shard 3 (data-parallel rank 0, context-parallel part 1, "
            "tensor-parallel part 1)"
        ) in str(late.value)
        publish(publishers[3:], 0, logits_of(0))
        with session.acquire(step=0, timeout=20) as batch:
            assert batch.real_row_count == ROWS


def test_the_same_part_again_is_fine_and_other_bytes_are_refused(
    client: tl.Client, name: str
) -> None:
    profiles = ranks(whole_teacher(name), "zigzag", context=2)
    with opened(client, profiles) as publishers:
        publish(publishers, 0, logits_of(0))
        publish(publishers[:1], 0, logits_of(0))

        with pytest.raises(PayloadConflictError, match="what is sealed does not change"):
            publish(publishers[:1], 0, logits_of(1))


def test_a_part_alone_is_not_read_as_if_it_were_the_rows(client: tl.Client, name: str) -> None:
    profiles = ranks(whole_teacher(name), "vocabulary", tensor=2)
    with (
        opened(client, profiles) as publishers,
        client.open_session(a_student(name)) as session,
    ):
        with reserve(publishers[0], 0) as draft:
            draft.select(own_logits(publishers[0].profile, logits_of(0)))

        with pytest.raises(PayloadInvalidError, match="holds a part of its rows"):
            session.acquire(payload_id=draft.payload_id)


def test_streams_may_be_encoded_part_by_part(
    client: tl.Client, name: str, whole: list[Read]
) -> None:
    profiles = ranks(whole_teacher(name), "zigzag", "vocabulary", tensor=2, context=2)
    student = a_student(
        name, transports=("stream",), value_codecs=("uint8",), id_codecs=("planes24",)
    )
    with opened(client, profiles) as publishers, client.open_session(student) as session:
        publish(publishers, 0, logits_of(0), loss_mask=MASK)
        found = Read.of(session, 0)

    assert torch.equal(found.columns["topk_ids"], whole[0].columns["topk_ids"])


def test_one_publisher_a_part(client: tl.Client, name: str) -> None:
    profiles = ranks(whole_teacher(name), "zigzag", context=2)
    with opened(client, profiles):
        with pytest.raises(SessionRefusedError, match="shard_taken") as refusal:
            client.open_publisher(profiles[1])

    assert "context-parallel part 1" in str(refusal.value)


def test_shards_of_rows_with_other_tokens_are_refused_without_the_student_s_ids(
    client: tl.Client, name: str
) -> None:
    profiles = ranks(whole_teacher(name), "sequence", context=2)
    with (
        opened(client, profiles) as publishers,
        client.open_session(a_student(name)) as session,
    ):
        publish(publishers[:1], 0, logits_of(0))
        publish(publishers[1:], 0, logits_of(0), input_ids=ids_of(1))
        with session.acquire(step=0, timeout=20) as batch:
            with pytest.raises(AlignmentError, match="are of other tokens"):
                batch.columns["row_digests"]


def test_ranks_that_hold_other_ids_count_the_same_positions(client: tl.Client, name: str) -> None:
    profiles = ranks(whole_teacher(name), "vocabulary", tensor=2)
    with opened(client, profiles) as publishers:
        publish(publishers[:1], 0, logits_of(0), loss_mask=MASK)

        with pytest.raises(PayloadConflictError, match="of their positions by the loss_mask"):
            publish(publishers[1:], 0, logits_of(0), loss_mask=~MASK)


def test_a_rank_may_write_what_it_has_selected_of_its_ids_by_itself(
    client: tl.Client, name: str, whole: list[Read]
) -> None:
    profiles = ranks(whole_teacher(name), "vocabulary", tensor=2)
    with (
        opened(client, profiles) as publishers,
        client.open_session(a_student(name)) as session,
    ):
        for publisher in publishers:
            with reserve(publisher, 0) as draft:
                own = draft.select(own_logits(publisher.profile, logits_of(0)))
                draft.write(**{kind: each.clone() for kind, each in own.columns.items()})
        with session.acquire(step=0, timeout=20) as batch:
            found = taken(batch)
    assert_same(found, whole[0].columns)


def test_ids_of_another_rank_are_refused(client: tl.Client, name: str) -> None:
    profiles = ranks(whole_teacher(name), "vocabulary", tensor=2)
    with opened(client, profiles) as publishers:
        draft = reserve(publishers[1], 0)
        own = draft.select(own_logits(publishers[1].profile, logits_of(0)))
        ids = own.topk_ids.clone()
        draft.write(topk_ids=ids - 16)

        with pytest.raises(PayloadInvalidError, match="which holds the ids 16 to 26"):
            draft.seal()


def test_the_log_probability_of_a_token_that_another_rank_holds_is_not_a_rank_s_to_say(
    client: tl.Client, name: str
) -> None:
    profiles = ranks(whole_teacher(name), "vocabulary", tensor=2)
    with opened(client, profiles) as publishers:
        draft = reserve(publishers[0], 0)
        own = draft.select(own_logits(publishers[0].profile, logits_of(0)))
        actual = own.actual_logprob
        assert actual is not None
        draft.write(actual_logprob=actual.clone().clamp_min(-40))

        with pytest.raises(PayloadInvalidError, match="give -inf there"):
            draft.seal()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": None}, "only lengths are given"),
        ({"input_ids": ids_of(0)[:, :10]}, "pad it to a multiple of 4"),
        ({"loss_mask": [3, 2, 3, 3]}, "give the marks"),
    ],
)
def test_rows_that_cannot_be_divided_are_refused_before_anything_is_sent(
    client: tl.Client, name: str, given: dict[str, object], message: str
) -> None:
    profiles = ranks(whole_teacher(name), "zigzag", context=2)
    given = {"lengths": LENGTHS.clamp_max(10), **given}
    with opened(client, profiles) as publishers:
        with pytest.raises(PayloadInvalidError, match=message):
            reserve(publishers[0], 0, **given)


def test_logits_of_the_whole_rows_or_the_whole_head_are_refused(
    client: tl.Client, name: str
) -> None:
    profiles = ranks(whole_teacher(name), "zigzag", "vocabulary", tensor=2, context=2)
    with opened(client, profiles) as publishers:
        with reserve(publishers[0], 0) as draft:
            with pytest.raises(PayloadInvalidError, match="are 6 wide"):
                draft.select(logits_of(0)[:, :, :16])
            with pytest.raises(PayloadInvalidError, match=r"32 columns.*this rank has 16"):
                draft.select(logits_of(0)[:, :6])
            draft.abandon()
