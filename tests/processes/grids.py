"""The ranks of a teacher and of a student, each a process that a test lets go step by step.

A rank works until the step that it is told, says that it is there, and waits to be told the next.
Every number that is written follows from step, row and position, and is small: what a rank works
out to compare it takes next to no memory. Garbage is never collected, so that whatever only a
collection would free shows.
"""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait

import torch
from tests.processes.running import PATIENCE_SECONDS

import teacher_logits_client as tl
from teacher_logits.digest import row_digest
from teacher_logits.grid import rows_of_rank

TEACHER = "published"
ROWS = 16
TEACHER_GRID = tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=2, micro_batch_size=4)
STUDENT_GRID = tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=4, micro_batch_size=2)
VOCABULARY_SIZE, K, LONGEST = 61, 5, 12
TEMPERATURES = (1.0, 2.0)
POOL_BYTES = 32 * 1024
"""Room for a few steps of a shard, in one slab."""

Work = Callable[[int], None]


def tokens_of(step: int, row: int) -> list[int]:
    """Return a row's token ids."""
    count = 2 + (step * 3 + row * 7) % (LONGEST - 1)
    return [(step * 29 + row * 13 + position * 7) % VOCABULARY_SIZE for position in range(count)]


def logits_of(step: int, row: int) -> torch.Tensor:
    """Return what the teacher says about a row, fp32 [L,V]."""
    positions = torch.arange(len(tokens_of(step, row))).unsqueeze(1)
    columns = torch.arange(VOCABULARY_SIZE)
    seed = step * 7919 + row * 1031 + positions * 173
    return ((seed + columns * columns * 37 + columns * seed) % 499) / 64


def check(columns: Mapping[str, torch.Tensor], step: int, rows: Iterable[int]) -> None:
    """Hold every column against what its teacher wrote, to the bit."""
    ids = [tokens_of(step, row) for row in rows]
    kept = tl.select_top_k(
        torch.cat([logits_of(step, row) for row in rows]),
        k=K,
        temperatures=TEMPERATURES,
        next_ids=torch.tensor([token for row in ids for token in [*row[1:], -1]]),
    )
    assert kept.actual_logprob is not None
    lengths = torch.tensor([len(row) for row in ids])
    right = {
        "topk_ids": kept.topk_ids,
        "topk_logprobs": kept.topk_logprobs.half(),
        "log_tail": kept.log_tail,
        "logsumexp": kept.logsumexp,
        "actual_logprob": kept.actual_logprob,
        "row_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "row_windows": torch.stack([torch.zeros_like(lengths), lengths], 1).int(),
        "row_digests": torch.tensor([list(row_digest(row)) for row in ids], dtype=torch.uint8),
        "row_status": torch.zeros(len(ids), dtype=torch.uint8),
    }
    assert set(columns) == set(right)
    for name, column in columns.items():
        assert torch.equal(column, right[name]), f"step {step}, rows {rows}: {name} is {column}"


class Rank:
    """A rank's process, as the test sees it."""

    def __init__(self, target: Callable[[Connection], None], name: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "teacher_logits_client.client"])
        self.name = name
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, step: int) -> None:
        """Let it work until it is done with a step."""
        self.pipe.send(step)

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join(PATIENCE_SECONDS)
        self.pipe.close()


def await_done(ranks: Sequence[Rank]) -> None:
    """Wait until all are done with the step that they were told; who fails is heard at once."""
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting:
        ready = wait(waiting, PATIENCE_SECONDS)
        assert ready, f"{[rank.name for rank in waiting.values()]} said nothing"
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                said = rank.pipe.recv()
            except EOFError:
                raise AssertionError(f"{rank.name} is gone") from None
            assert said == "done", f"{rank.name}: {said}"


@contextmanager
def grids(address: str, transport: str) -> Iterator[list[Rank]]:
    """Start two publishers and four students, all over one transport."""
    ranks = [
        Rank(partial(_live, kind, address, transport, rank), f"{kind.__name__[1:]} {rank}")
        for kind, count in ((_publisher, 2), (_student, 4))
        for rank in range(count)
    ]
    try:
        await_done(ranks)
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def _live(
    kind: Callable[[tl.Client, str, int], Iterator[Work]],
    address: str,
    transport: str,
    rank: int,
    pipe: Connection,
) -> None:
    """Be a rank."""
    torch.set_num_threads(1)
    gc.disable()
    try:
        with tl.connect(address, timeout=PATIENCE_SECONDS) as client:
            for work in kind(client, transport, rank):
                pipe.send("done")
                done = 0
                while True:
                    last = pipe.recv()
                    for step in range(done + 1, last + 1):
                        work(step)
                    done = last
                    pipe.send("done")
    except EOFError:
        os._exit(0)
    except Exception as error:
        pipe.send(repr(error))
        os._exit(1)


def _publisher(client: tl.Client, transport: str, rank: int) -> Iterator[Work]:
    profile = tl.TeacherProfile(
        teacher_id=TEACHER,
        vocabulary_size=VOCABULARY_SIZE,
        head_rows=VOCABULARY_SIZE,
        top_k=K,
        max_row_tokens=LONGEST,
        temperatures=TEMPERATURES,
        batch_grid=TEACHER_GRID,
        data_parallel_rank=rank,
    )
    own = rows_of_rank(TEACHER_GRID, rank)
    with client.open_publisher(
        profile,
        transports=(transport,),
        pool_size_bytes=POOL_BYTES,
        slab_size_bytes=POOL_BYTES,
        timeout=PATIENCE_SECONDS,
    ) as publisher:
        assert publisher.transport.value == transport

        def publish(step: int) -> None:
            ids = [tokens_of(step, row) for row in own]
            marks = [[True] * len(row) for row in ids]
            with publisher.reserve(
                step, input_ids=ids, loss_mask=marks, timeout=PATIENCE_SECONDS
            ) as draft:
                tl.select_top_k(torch.cat([logits_of(step, row) for row in own]), out=draft)

        yield publish


def _student(client: tl.Client, transport: str, rank: int) -> Iterator[Work]:
    profile = tl.StudentProfile(
        teacher_id=TEACHER,
        batch_grid=STUDENT_GRID,
        data_parallel_rank=rank,
        top_k=K,
        temperatures=TEMPERATURES[1:],
        transports=(tl.Transport(transport),),
    )
    own = rows_of_rank(STUDENT_GRID, rank)
    with client.open_session(profile, timeout=PATIENCE_SECONDS) as session:

        def learn(step: int) -> None:
            ids = [tokens_of(step, row) for row in own]
            with session.acquire(step=step, input_ids=ids, timeout=PATIENCE_SECONDS) as batch:
                assert (batch.rows, batch.real_row_count) == (own, len(own))
                assert {each.value for each in batch.transports.values()} == {transport}
                check(batch.columns, step, own)
                seen: list[int] = []
                for micro_batch in batch.micro_batches():
                    assert micro_batch.row_count == 2
                    check(micro_batch.columns, step, micro_batch.rows)
                    assert bool(micro_batch.targets.topk_logprobs.isfinite().all())
                    seen += micro_batch.rows
                assert seen == list(own)
                counts = [len(tokens_of(step, row)) - 1 for row in range(ROWS)]
                assert batch.global_count == sum(counts)

        yield learn
