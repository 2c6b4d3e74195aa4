"""Steps at their edges: fewer entries than were published, ranks whose rows are all padding."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.publishing.a_publisher import (
    VOCABULARY,
    WIDTH,
    K,
    a_grid,
    a_student,
    a_teacher,
    expected,
    some_rows,
)

import teacher_logits_client as tl
from teacher_logits.errors import (
    AlignmentError,
    ChecksumError,
    DeadlinePassedError,
    PayloadInvalidError,
    PayloadRetiredError,
)
from teacher_logits_client import line
from teacher_logits_client.calls.registry import chunk
from teacher_logits_client.fallback import MAX_STREAM_TRIES
from teacher_logits_client.publishing import uploads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.selection import Selection

LONG = 30.0
names = (f"edge-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with tl.testing.serve(pool_size="4MiB") as server:
        yield server.address


@pytest.fixture
def client(address: str) -> Iterator[tl.Client]:
    with tl.connect(address) as client:
        yield client


@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_a_student_that_asks_for_fewer_entries_has_all_that_were_published(
    client: tl.Client, way: str
) -> None:
    ids, lengths, logits = some_rows(0)
    name = next(names)
    with (
        client.open_publisher(a_teacher(name)) as publisher,
        client.open_session(a_student(name, top_k=2, transports=way)) as session,
    ):
        with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            tl.select_top_k(logits, out=draft)
        with session.acquire(step=0, input_ids=ids, lengths=lengths, timeout=LONG) as batch:
            wanted: Selection = expected(ids, lengths, logits)  # type: ignore[assignment]
            assert batch.targets.topk_ids.shape[1] == K
            assert torch.equal(batch.columns["topk_ids"], wanted.topk_ids)


@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_a_partial_last_step_has_ranks_of_padding_alone(client: tl.Client, way: str) -> None:
    """Eight rows on four ranks each side, of which three are real."""
    ids, lengths, logits = some_rows(0, rows=3)
    name = next(names)
    grid = a_grid(4, rows=8, micro=2)
    total, counted = 0.0, 0
    with ExitStack() as stack:
        publishers = [
            stack.enter_context(
                client.open_publisher(
                    a_teacher(name, batch_grid=grid, data_parallel_rank=rank),
                    transports=(way,),
                    pool_size_bytes=1 << 16,
                )
            )
            for rank in range(4)
        ]
        sessions = [
            stack.enter_context(
                client.open_session(
                    a_student(name, batch_grid=grid, data_parallel_rank=rank, transports=way)
                )
            )
            for rank in range(4)
        ]
        for rank, publisher in enumerate(publishers):
            own = slice(2 * rank, min(2 * rank + 2, 3))
            if own.start >= 3:
                with pytest.raises(PayloadInvalidError, match="publishes nothing for this step"):
                    publisher.reserve(0, input_ids=ids[:2], real_rows=3)
                continue
            with publisher.reserve(
                0,
                input_ids=ids[own],
                lengths=lengths[own],
                loss_mask=(lengths[own] - 1).tolist(),
                real_rows=3,
            ) as draft:
                tl.select_top_k(logits[own], out=draft)
        for rank, session in enumerate(sessions):
            own = slice(2 * rank, min(2 * rank + 2, 3))
            given = {"input_ids": ids[own], "lengths": lengths[own]} if own.start < 3 else {}
            student = torch.randn(2, WIDTH, VOCABULARY, requires_grad=True)
            with session.acquire(step=0, timeout=LONG, **given) as batch:
                (micro_batch,) = batch.micro_batches()
                loss, count = tl.losses.forward_kl(student, micro_batch.targets)
                assert batch.global_count is not None
                (loss / batch.global_count).backward()
                total, counted = total + loss.item(), counted + int(count)
                if batch.real_row_count == 0:
                    assert (loss.item(), int(count)) == (0.0, 0)
                    assert student.grad is not None
                    assert not student.grad.any()
                    assert batch.transports == {}
                assert batch.global_count == int((lengths - 1).sum())
                del micro_batch
        assert total > 0
        assert counted == int((lengths - 1).sum())


@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_a_step_that_its_reader_refused_is_there_until_it_was_read(
    client: tl.Client, way: str
) -> None:
    ids, lengths, logits = some_rows(0)
    name = next(names)
    with (
        client.open_publisher(a_teacher(name)) as publisher,
        client.open_session(a_student(name, transports=way)) as session,
    ):
        with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            tl.select_top_k(logits, out=draft)
        for _ in range(2):
            with pytest.raises(AlignmentError):
                session.acquire(step=0, input_ids=ids.flip(0), lengths=lengths.flip(0))
            assert session._returner.wait(LONG)
        with session.acquire(step=0, input_ids=ids, lengths=lengths, timeout=LONG) as batch:
            assert batch.real_row_count == len(ids)
        assert session._returner.wait(LONG)
        with pytest.raises(PayloadRetiredError):
            session.acquire(step=0, timeout=LONG)


@pytest.mark.parametrize("flaws", [1, 9])
def test_a_chunk_that_changes_on_the_way_is_sent_again_and_not_for_ever(
    client: tl.Client, monkeypatch: pytest.MonkeyPatch, flaws: int
) -> None:
    ids, lengths, logits = some_rows(0)
    name = next(names)
    left = [flaws]

    def flawed(data: memoryview, offset_bytes: int) -> bytes:
        message = bytearray(chunk(data, offset_bytes))
        if left[0]:
            left[0] -= 1
            message[-1] ^= 1
        return bytes(message)

    with client.open_publisher(a_teacher(name), transports=("stream",)) as publisher:
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        tl.select_top_k(logits, out=draft)
        monkeypatch.setattr(uploads, "chunk", flawed)
        if flaws > MAX_STREAM_TRIES:
            with pytest.raises(ChecksumError, match="go on from byte 0"):
                draft.seal(timeout=LONG)
            return
        draft.seal(timeout=LONG)
        with (
            client.open_session(a_student(name)) as session,
            session.acquire(step=0, input_ids=ids, lengths=lengths, timeout=LONG) as batch,
        ):
            wanted: Selection = expected(ids, lengths, logits)  # type: ignore[assignment]
            assert torch.equal(batch.columns["topk_ids"], wanted.topk_ids)


@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_a_student_without_ids_at_hand_counts_what_the_whole_step_counts(
    client: tl.Client, way: str
) -> None:
    """A row's last position has no next token, and the payload says that it is the last."""
    ids, lengths, logits = some_rows(0)
    name = next(names)
    every = torch.ones_like(ids, dtype=torch.bool)
    with (
        client.open_publisher(a_teacher(name)) as publisher,
        client.open_session(a_student(name, transports=way)) as session,
    ):
        with publisher.reserve(0, input_ids=ids, lengths=lengths, loss_mask=every) as draft:
            tl.select_top_k(logits, out=draft)
        with session.acquire(step=0, timeout=LONG) as batch:
            assert int(batch.targets.valid.sum()) == batch.global_count


def test_a_wait_over_shared_memory_ends_with_what_the_step_lacks(
    client: tl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "SAY_WHY_SECONDS", LONG)
    ids, lengths, _ = some_rows(0)
    name = next(names)
    with (
        client.open_publisher(a_teacher(name)) as publisher,
        client.open_session(a_student(name, transports="shared_memory")) as session,
    ):
        with pytest.raises(DeadlinePassedError, match="nothing of it is reserved; the lowest"):
            session.acquire(step=4, timeout=1.0)
        publisher.reserve(0, input_ids=ids, lengths=lengths).abandon()
        publisher.close()
        with pytest.raises(DeadlinePassedError, match="no publisher of the teacher is left"):
            session.acquire(step=0, timeout=1.0)
