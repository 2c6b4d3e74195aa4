"""Publishers as people use them, over processes: the server dies, stops, or they do."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests import forked
from tests.client.publishing.a_publisher import a_grid, a_student, a_teacher, expected, some_rows
from tests.client.publishing.test_publisher import same
from tests.processes.running import PATIENCE_SECONDS, line_of
from tests.processes.test_fifty_steps import await_true
from tests.reports.raw import connect_raw
from tests.stopping import stopped

import teacher_logits_client as tl
from teacher_logits.errors import (
    DeadlinePassedError,
    NotAvailable,
    PayloadInvalidError,
    ServerUnreachableError,
    SessionExpiredError,
    StaleReference,
)

ROOT = Path(__file__).parents[2]
WAYS = (("shared_memory",), ("stream",))

_CHILD = """
import sys
import teacher_logits_client as tl
from tests.client.publishing.a_publisher import a_teacher, some_rows

address, name, command = sys.argv[1:]
with tl.connect(address) as client, client.open_publisher(a_teacher(name)) as publisher:
    ids, lengths, logits = some_rows(0)
    draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
    tl.select_top_k(logits, out=draft)
    if command == "seal":
        draft.seal()
    print(command, flush=True)
    sys.stdin.readline()
    if command == "seal":
        raise SystemExit  # and leaves as it should
"""


@contextmanager
def publisher(address: str, name: str, command: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that publishes step 0, or only writes it, and waits."""
    process: subprocess.Popen[str] = forked.Popen(
        [sys.executable, "-c", _CHILD, address, name, command],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert line_of(process) == command
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[tl.testing.ServerProcess]:
    with tl.testing.serve(pool_size="16MiB") as running:
        yield running


@pytest.mark.parametrize("command", ["reserve", "seal"])
def test_a_killed_publisher_s_step_is_written_again_by_its_successor(
    server: tl.testing.ServerProcess, command: str
) -> None:
    name = f"killed-{command}"
    with tl.connect(server.address) as client:
        with publisher(server.address, name, command) as process:
            process.kill()
            process.wait(PATIENCE_SECONDS)
        ids, lengths, logits = some_rows(0)
        # The server is told of a process's end, and may refuse its successor until then.
        with connect_raw(server.address) as raw:
            dead = process.pid
            await_true(lambda: dead not in [each.pid for each in raw.inspect().sessions])
        with client.open_publisher(a_teacher(name)) as successor:
            with successor.reserve(0, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits, out=draft)
            with (
                client.open_session(a_student(name)) as session,
                session.acquire(step=0, input_ids=ids, lengths=lengths) as batch,
            ):
                assert same(batch.columns, expected(ids, lengths, logits))


def test_what_was_sealed_is_read_from_a_process_that_has_ended(
    server: tl.testing.ServerProcess,
) -> None:
    with publisher(server.address, "ended", "seal") as process:
        process.communicate("\n", PATIENCE_SECONDS)
        assert process.returncode == 0
    ids, lengths, logits = some_rows(0)
    with (
        tl.connect(server.address) as client,
        client.open_session(a_student("ended")) as session,
        session.acquire(step=0, input_ids=ids, lengths=lengths) as batch,
    ):
        assert set(batch.transports.values()) == {tl.Transport.SHARED_MEMORY}
        assert same(batch.columns, expected(ids, lengths, logits))


def test_students_that_wait_go_on_waiting_when_a_bad_row_is_refused(
    server: tl.testing.ServerProcess,
) -> None:
    """R53: a fault is never swallowed, and the step stays open for a good try."""
    ids, lengths, logits = some_rows(0)
    bad = logits.clone()
    bad[3, 0, 0] = float("inf")
    with (
        tl.connect(server.address) as client,
        client.open_publisher(a_teacher("refused")) as teacher,
        client.open_session(a_student("refused")) as session,
    ):
        with pytest.raises(PayloadInvalidError, match=r"row 3 .* a \+inf at position 0"):
            _write(teacher, 0, bad)
        with pytest.raises(DeadlinePassedError):
            session.acquire(step=0, timeout=0.2)
        _write(teacher, 0, logits)
        with session.acquire(step=0, input_ids=ids, lengths=lengths) as batch:
            assert same(batch.columns, expected(ids, lengths, logits))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way[0]))
def test_a_killed_server_is_noticed_and_its_successor_served(
    tmp_path: Path, way: tuple[str, ...]
) -> None:
    listen = f"unix:{tmp_path / 's'}"
    ids, lengths, logits = some_rows(0)
    with tl.testing.serve(listen=listen) as first:
        client = tl.connect(listen)
        teacher = client.open_publisher(a_teacher("published"), transports=way)
        draft = teacher.reserve(0, input_ids=ids, lengths=lengths)
        tl.select_top_k(logits, out=draft)
        os.kill(first.pid, signal.SIGKILL)
        first.wait(PATIENCE_SECONDS)
        with pytest.raises((ServerUnreachableError, SessionExpiredError)):
            draft.seal(timeout=PATIENCE_SECONDS)
    with tl.testing.serve(listen=listen):
        with pytest.raises((StaleReference, NotAvailable)):
            teacher.reserve(1, input_ids=ids, lengths=lengths, timeout=PATIENCE_SECONDS)
        with client.open_publisher(
            a_teacher("published"), transports=way, timeout=PATIENCE_SECONDS
        ) as successor:
            _write(successor, 0, logits)
        draft.abandon()
        teacher.close()
        client.close()


def test_a_seal_that_a_stopped_server_does_not_answer_can_be_tried_again() -> None:
    ids, lengths, logits = some_rows(0)
    with (
        tl.testing.serve() as server,
        tl.connect(server.address) as client,
        client.open_publisher(a_teacher("published")) as teacher,
    ):
        draft = teacher.reserve(0, input_ids=ids, lengths=lengths)
        tl.select_top_k(logits, out=draft)
        with stopped(server.pid), pytest.raises(DeadlinePassedError):
            draft.seal(timeout=0.1)
        draft.seal(timeout=PATIENCE_SECONDS)
        with client.open_session(a_student("published")) as session:
            session.acquire(step=0, input_ids=ids, lengths=lengths).close()


def test_a_claim_that_a_stopped_server_does_not_answer_is_given_up() -> None:
    ids, lengths, logits = some_rows(0)
    with (
        tl.testing.serve() as server,
        tl.connect(server.address) as client,
        client.open_publisher(a_teacher("published")) as teacher,
    ):
        with stopped(server.pid), pytest.raises(DeadlinePassedError):
            teacher.reserve(0, input_ids=ids, lengths=lengths, timeout=0.1)
        assert client._returner.wait(PATIENCE_SECONDS)
        _write(teacher, 0, logits)


def test_a_teacher_of_two_ranks_waits_for_its_students_step_by_step(
    server: tl.testing.ServerProcess,
) -> None:
    """Fifty steps through room for a few: memory is bounded, and every row is right."""
    grid = a_grid(2)
    with tl.connect(server.address) as client:
        teachers = [
            client.open_publisher(
                a_teacher("two", batch_grid=grid, data_parallel_rank=rank),
                pool_size_bytes=1 << 14,
                slab_size_bytes=1 << 14,
            )
            for rank in range(2)
        ]
        with client.open_session(a_student("two"), prefetch=0) as session:
            for step in range(50):
                ids, lengths, logits = some_rows(step)
                for rank, teacher in enumerate(teachers):
                    own = slice(2 * rank, 2 * rank + 2)
                    with teacher.reserve(step, input_ids=ids[own], lengths=lengths[own]) as draft:
                        tl.select_top_k(logits[own], out=draft)
                with session.acquire(step=step, input_ids=ids, lengths=lengths) as batch:
                    assert same(batch.columns, expected(ids, lengths, logits))
        for teacher in teachers:
            teacher.close()


def _write(teacher: tl.Publisher, step: int, logits: object) -> None:
    ids, lengths, _ = some_rows(step)
    with teacher.reserve(step, input_ids=ids, lengths=lengths) as draft:
        tl.select_top_k(logits, out=draft)  # type: ignore[call-overload]
