"""Steps from a teacher's publishers to a student's ranks, over a server in a process of its own."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.losses.shards import VOCABULARY_SIZE, Ids, K, logits_of, some_ids

import teacher_logits_client as tl
from teacher_logits.errors import DeadlinePassedError, PayloadRetiredError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_client.testing import ServerProcess

LONG = 30.0
ROWS = 16
TEACHER_GRID = tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=2, micro_batch_size=4)
STUDENT_GRID = tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=4, micro_batch_size=2)
teacher_ids = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with tl.testing.serve(pool_size="8MiB", slab_size="1MiB") as server:
        yield server


class Crew:
    """The publishers of a teacher of its own, and the four ranks that learn from it."""

    def __init__(self, stack: ExitStack, address: str, *, writers: str, readers: str) -> None:
        teacher_id = f"teacher-{next(teacher_ids)}"
        self.teachers = stack.enter_context(tl.connect(address))
        self.students = stack.enter_context(tl.connect(address))
        self.publishers = [
            stack.enter_context(
                self.teachers.open_publisher(
                    tl.TeacherProfile(
                        teacher_id=teacher_id,
                        vocabulary_size=VOCABULARY_SIZE,
                        head_rows=VOCABULARY_SIZE,
                        top_k=K,
                        max_row_tokens=64,
                        batch_grid=TEACHER_GRID,
                        data_parallel_rank=shard,
                    ),
                    pool_size_bytes=1 << 18,
                    slab_size_bytes=1 << 16,
                    transports=(writers,),
                )
            )
            for shard in range(2)
        ]
        self.sessions = [
            stack.enter_context(
                self.students.open_session(
                    tl.StudentProfile(
                        teacher_id=teacher_id,
                        batch_grid=STUDENT_GRID,
                        data_parallel_rank=rank,
                        top_k=K,
                        student_id=teacher_id,
                        transports=(tl.Transport(readers),),
                    )
                )
            )
            for rank in range(4)
        ]

    def publish(self, step: int, ids: Ids, *, real_rows: int | None = None) -> None:
        """Have both shards of a step written and sealed."""
        for shard, publisher in enumerate(self.publishers):
            own = ids[8 * shard : 8 * shard + 8]
            if own:
                mask = [[True] * len(row) for row in own]
                with publisher.reserve(
                    step, input_ids=own, loss_mask=mask, real_rows=real_rows
                ) as draft:
                    tl.select_top_k(torch.cat([logits_of(row) for row in own]), out=draft)


@pytest.fixture(params=["shared_memory", "stream"])
def writers(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["shared_memory", "stream"])
def readers(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def crew(server: ServerProcess, writers: str, readers: str) -> Iterator[Crew]:
    with ExitStack() as stack:
        yield Crew(stack, server.address, writers=writers, readers=readers)


def expected(ids: Ids) -> list[list[int]]:
    if not ids:
        return []
    best: list[list[int]] = tl.select_top_k(
        torch.cat([logits_of(row) for row in ids]), k=K
    ).topk_ids.tolist()
    return best


def read(session: tl.Session, step: int, ids: Ids) -> tuple[int | None, list[list[int]]]:
    """A rank's rows of a step, micro batch by micro batch, and the step's count."""
    seen: list[list[int]] = []
    with session.acquire(step=step, input_ids=ids, timeout=LONG) as batch:
        for each in batch.micro_batches():
            assert each.row_count == 2
            seen += each.targets.topk_ids.tolist()
        return batch.global_count, seen


def test_ten_steps_reach_every_rank_row_by_row(crew: Crew) -> None:
    steps = {step: some_ids(ROWS, seed=step) for step in range(10)}

    def teach() -> None:
        for step, ids in steps.items():
            crew.publish(step, ids)

    with ThreadPoolExecutor(5) as threads:
        publishing = threads.submit(teach)

        def learn(rank: int) -> None:
            for step, ids in steps.items():
                own = ids[4 * rank : 4 * rank + 4]
                count, seen = read(crew.sessions[rank], step, own)
                assert seen == expected(own), (step, rank)
                assert count == sum(len(row) - 1 for row in ids)

        for done in [threads.submit(learn, rank) for rank in range(4)]:
            done.result(LONG)
        publishing.result(LONG)
    with pytest.raises(PayloadRetiredError, match="step 3 is retired"):
        crew.sessions[0].acquire(step=3, timeout=LONG)


def test_a_partial_last_step_has_its_padding_at_the_end(crew: Crew) -> None:
    ids = some_ids(5)
    crew.publish(0, ids, real_rows=5)
    for rank, session in enumerate(crew.sessions):
        own = ids[4 * rank : 4 * rank + 4]
        with session.acquire(step=0, timeout=LONG) as batch:
            assert batch.columns["topk_ids"].tolist() == expected(own)
            assert (batch.real_row_count, batch.row_count) == (len(own), 4)
            assert batch.targets.row_offsets.diff().tolist() == (
                [len(row) for row in own] + [0] * (4 - len(own))
            )


def test_a_step_that_lacks_a_shard_is_waited_for(crew: Crew) -> None:
    ids = some_ids(ROWS)
    with crew.publishers[0].reserve(0, input_ids=ids[:8]) as draft:
        tl.select_top_k(torch.cat([logits_of(row) for row in ids[:8]]), out=draft)
    with pytest.raises(DeadlinePassedError, match="step 0"):
        crew.sessions[0].acquire(step=0, timeout=0.2)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(read, crew.sessions[0], 0, ids[:4])
        with crew.publishers[1].reserve(0, input_ids=ids[8:]) as draft:
            tl.select_top_k(torch.cat([logits_of(row) for row in ids[8:]]), out=draft)
        assert waiting.result(LONG)[1] == expected(ids[:4])
