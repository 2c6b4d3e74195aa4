"""Registered steps, where they went wrong elsewhere: R27, R33, T50."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from tests.client.publishing.a_publisher import (
    VOCABULARY,
    a_grid,
    a_student,
    a_teacher,
    expected,
    some_rows,
)
from tests.client.publishing.test_publisher import same
from tests.processes.running import PATIENCE_SECONDS, line_of
from tests.processes.test_publishers import publisher
from tests.reports.memory import forget_peak, peak_bytes
from tests.server.services import registry_rig

import teacher_logits_client as tl
from teacher_logits.errors import AlignmentError, ProducerLostError

MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[tl.testing.ServerProcess]:
    with tl.testing.serve(pool_size="1MiB", slab_size="1MiB") as running:
        yield running


def test_r27_one_altered_id_fails_the_rank_that_has_its_row_and_no_other(
    server: tl.testing.ServerProcess,
) -> None:
    ids, lengths, logits = some_rows(0)
    altered = ids.clone()
    altered[2, 1] = (altered[2, 1] + 1) % VOCABULARY
    with ExitStack() as stack:
        client = stack.enter_context(tl.connect(server.address))
        teacher = stack.enter_context(client.open_publisher(a_teacher("altered")))
        with teacher.reserve(0, input_ids=altered, lengths=lengths) as draft:
            tl.select_top_k(logits, out=draft)
        for rank in range(4):
            profile = a_student("altered", batch_grid=a_grid(4), data_parallel_rank=rank)
            session = stack.enter_context(client.open_session(profile))
            own = slice(rank, rank + 1)
            if rank == 2:
                with pytest.raises(AlignmentError, match="row 2") as caught:
                    session.acquire(step=0, input_ids=ids[own], lengths=lengths[own])
                assert caught.value.facts["row"] == 2
                continue
            with session.acquire(step=0, input_ids=ids[own], lengths=lengths[own]) as batch:
                assert same(batch.columns, expected(ids[own], lengths[own], logits[own]))


def test_r33_all_eight_that_wait_hear_of_their_teachers_end(
    server: tl.testing.ServerProcess,
) -> None:
    """Four ranks, each with a reader that waits over a line and one that waits in a call.

    One of the two publishers dies, of which they have read nothing; the other has yet to write.
    """
    with ExitStack() as stack:
        dies = stack.enter_context(publisher(server.address, 0, of=2))
        client = stack.enter_context(tl.connect(server.address))
        lives = stack.enter_context(client.open_publisher(registry_rig.a_teacher(1, of=2)))
        sessions = [
            stack.enter_context(
                client.open_session(
                    registry_rig.a_student(
                        rank,
                        of=4,
                        teacher_id=lives.profile.teacher_id,
                        readers_per_rank=2,
                        transports=(transport,),
                    ),
                    timeout=PATIENCE_SECONDS,
                )
            )
            for rank in range(4)
            for transport in (tl.Transport.SHARED_MEMORY, tl.Transport.STREAM)
        ]
        assert line_of(dies.process) == "ready"
        dies.do("publish", 0)
        with ThreadPoolExecutor(len(sessions)) as threads:
            waiting = [
                threads.submit(session.acquire, step=0, timeout=PATIENCE_SECONDS)
                for session in sessions
            ]
            dies.kill()
            for each in waiting:
                assert isinstance(each.exception(PATIENCE_SECONDS), ProducerLostError)


def test_t50_a_payload_between_processes_passes_the_server_by(
    server: tl.testing.ServerProcess,
) -> None:
    """A publisher's 64 MiB, of which a student reads every byte."""
    k, tokens = 40, 64 * MIB // 336
    one = tl.select_top_k(
        torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0)),
        k=k,
        next_ids=torch.zeros(1, dtype=torch.int64),
    )
    assert one.actual_logprob is not None
    with ExitStack() as stack:
        client = stack.enter_context(tl.connect(server.address))
        profile = a_teacher(
            "large",
            top_k=k,
            max_row_tokens=tokens,
            batch_grid=a_grid(rows=1),
            temperatures=(),
        )
        teacher = stack.enter_context(
            client.open_publisher(profile, transports=("shared_memory",), pool_size_bytes=80 * MIB)
        )
        student = a_student("large", top_k=k, batch_grid=a_grid(rows=1), temperatures=())
        session = stack.enter_context(client.open_session(student))
        actual = one.actual_logprob.repeat(tokens)
        actual[-1] = 0.0
        before = forget_peak(server.pid)
        with teacher.reserve(0, lengths=[tokens]) as draft:
            draft.write(
                topk_ids=one.topk_ids.expand(tokens, k),
                topk_logprobs=one.topk_logprobs.expand(tokens, k),
                log_tail=one.log_tail.expand(tokens, 1),
                logsumexp=one.logsumexp.expand(tokens, 1),
                actual_logprob=actual,
            )
        with session.acquire(step=0) as batch:
            assert set(batch.transports.values()) == {tl.Transport.SHARED_MEMORY}
            assert sum(column.nbytes for column in batch.columns.values()) > 60 * MIB
            for column in batch.columns.values():
                assert torch.equal(column, column.clone())
            del column
        assert peak_bytes(server.pid) - before < 5 * MIB
