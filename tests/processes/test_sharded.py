"""A teacher of two by two ranks, each a process of its own, and a student that reads whole rows."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests import forked
from tests.client.payloads.shard_rig import written
from tests.client.publishing.sharded import (
    LENGTHS,
    a_student,
    ids_of,
    logits_of,
    whole_teacher,
)
from tests.processes.running import PATIENCE_SECONDS, line_of
from tests.processes.test_fifty_steps import await_true
from tests.reports.raw import connect_raw

import teacher_logits_client as tl
from teacher_logits.errors import ProducerLostError
from teacher_logits.layout import ColumnKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits_client.payloads.batch import Batch

ROOT = Path(__file__).parents[2]
Ranks = list["subprocess.Popen[str]"]


@contextmanager
def rank(address: str, teacher_id: str, number: int) -> Iterator[subprocess.Popen[str]]:
    """A rank, before it is ready; it is killed in the end if it still runs."""
    process: subprocess.Popen[str] = forked.Popen(
        [sys.executable, "-m", "tests.processes.shard_rank", address, teacher_id, str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(processes: Sequence[subprocess.Popen[str]], command: str, step: int) -> None:
    """Have ranks do something of a step at once, and wait until all of them have."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{command} {step}\n")
        process.stdin.flush()
    done = {"publish": "sealed", "reserve": "reserved"}[command]
    assert [line_of(process) for process in processes] == [f"{done} {step}"] * len(processes)


def assert_whole(batch: Batch, step: int) -> None:
    """Hold a batch against what one rank says of the step."""
    expected = written(whole_teacher("whole"), logits_of(step), ids=ids_of(step), lengths=LENGTHS)
    for kind in (ColumnKind.TOPK_IDS, ColumnKind.TOPK_LOGITS, ColumnKind.ROW_WINDOWS):
        assert torch.equal(batch.columns[kind.value], expected[kind])
    for kind in (ColumnKind.LOG_TAIL, ColumnKind.ACTUAL_LOGPROB):
        torch.testing.assert_close(batch.columns[kind.value], expected[kind])


@pytest.fixture(scope="module")
def server() -> Iterator[tl.testing.ServerProcess]:
    with tl.testing.serve(pool_size="16MiB") as running:
        yield running


def test_a_rank_that_dies_is_named_and_its_successor_makes_the_step_whole(
    server: tl.testing.ServerProcess,
) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(tl.connect(server.address))
        ranks: Ranks = [
            stack.enter_context(rank(server.address, "ranks", number)) for number in range(4)
        ]
        assert [line_of(process) for process in ranks] == ["ready"] * 4
        session = stack.enter_context(client.open_session(a_student("ranks")))
        tell(ranks, "publish", 0)
        with session.acquire(step=0, input_ids=ids_of(0), lengths=LENGTHS) as batch:
            assert len(batch.transports) == 4
            assert_whole(batch, 0)

        tell([ranks[0], ranks[1], ranks[3]], "publish", 1)
        tell(ranks[2:3], "reserve", 1)
        ranks[2].kill()
        ranks[2].wait(PATIENCE_SECONDS)
        with pytest.raises(ProducerLostError, match="lacks shard 2 ") as lost:
            session.acquire(step=1)
        assert "context-parallel part 1, tensor-parallel part 0" in str(lost.value)

        # The server is told of a process's end, and may refuse its successor until then.
        with connect_raw(server.address) as raw:
            dead = ranks[2].pid
            await_true(lambda: dead not in [each.pid for each in raw.inspect().sessions])
        successor = stack.enter_context(rank(server.address, "ranks", 2))
        assert line_of(successor) == "ready"
        tell([successor], "publish", 1)
        with session.acquire(step=1, input_ids=ids_of(1), lengths=LENGTHS) as batch:
            assert_whole(batch, 1)
