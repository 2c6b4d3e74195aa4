"""Readers that do nothing let go of device memory that is gone, so that its owner may free it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from tests.cuda.censuses import await_mapped, census
from tests.cuda.engine_server import serve_engine
from tests.cuda.node import Node
from tests.cuda.workers import WorkerError
from tests.fake_cuda.log import done, faults, read_log
from tests.fake_cuda.spec import Spec
from tests.processes.test_fifty_steps import await_true
from tests.reports.raw import connect_raw

import teacher_logits_client as tl

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cuda.workers import Crew

PAGE = 4096
BUFFER_BYTES = 16 << 10


def test_an_idle_reader_closes_a_buffer_that_its_owner_takes_back(node: Node) -> None:
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("allocate_buffer", BUFFER_BYTES)
    publisher.ask("register")
    publisher.ask("publish_placed", 0)
    student.ask("read", 0)
    assert publisher.ask("is_buffer_open_elsewhere") is True

    publisher.ask("close_buffer")

    await_true(lambda: publisher.ask("is_buffer_open_elsewhere") is False)
    await_mapped(student, 0)


def test_an_idle_reader_closes_what_a_publisher_had_that_ends(node: Node) -> None:
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",), settings={"prefetch": 0})
    publisher.ask("publish", 0)
    student.ask("read", 0)
    publisher.ask("close_publisher")

    await_mapped(student, 0)
    await_true(lambda: publisher.ask("left_over") == 0)


def test_an_idle_reader_closes_what_a_killed_publisher_had(node: Node) -> None:
    publisher = node.publisher(name="doomed")
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("publish", 0)
    student.ask("read", 0)
    publisher.kill()

    await_mapped(student, 0)


def test_an_idle_reader_unmaps_slabs_of_the_host_that_a_killed_publisher_had(node: Node) -> None:
    publisher = node.publisher(name="doomed", device=None)
    student, _ = node.student(transports=("shared_memory",), settings={"prefetch": 0})
    before = census(student)["slabs"]
    publisher.ask("publish", 0)
    student.ask("read", 0)
    assert census(student)["slabs"] > before
    publisher.kill()

    await_true(lambda: census(student)["slabs"] == before)


def test_an_idle_reader_closes_what_it_has_when_the_server_is_killed(
    workers: Crew, tmp_path: Path
) -> None:
    """The publisher is there, and its memory is its own again once it has closed."""
    with tl.testing.serve(pool_size="1MiB") as server:
        node = Node(address=server.address, crew=workers, folder=tmp_path)
        publisher = node.publisher(name="orphan")
        student, _ = node.student(transports=("cuda_ipc",), settings={"prefetch": 0})
        before = census(student)["slabs"]
        publisher.ask("publish", 0)
        student.ask("read", 0)
    await_mapped(student, 0)
    await_true(lambda: census(student)["slabs"] <= before)
    publisher.kill()
    node.assert_nothing_is_left(publisher.pid)


def test_a_reader_that_still_reads_keeps_it_until_then(node: Node) -> None:
    publisher = node.publisher(name="doomed")
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("publish", 0, 1)
    student.ask("hold", 0)
    student.ask("hold", 1)
    publisher.kill()
    student.ask("release", 1)
    student.ask("check", 0)
    student.ask("release", 0)

    await_mapped(student, 0)


def test_an_idle_reader_of_scores_closes_what_the_server_gives_up(
    workers: Crew, tmp_path: Path
) -> None:
    """It asks for nothing but scores, and its slab makes way for a larger one."""
    spec = Spec(folder=str(tmp_path))
    with serve_engine(spec, device_pool_size=2 * PAGE, slab_size=PAGE, pool_size="1MiB") as server:
        reader, other = workers["reader"], workers["other"]
        for worker in (reader, other):
            worker.ask("connect", server.address, spec.dumps())
            worker.ask("open_scoring", transports=("cuda_ipc",))
        reader.ask("score", [[1, 2, 3]])
        reader.ask("close_scored")
        await_mapped(reader, 1)

        other.ask("score", [[7] * 80])

        await_mapped(reader, 0)
        workers.reset()
        assert faults(read_log(tmp_path)) == []
        assert len(done(read_log(tmp_path), "close")) == len(done(read_log(tmp_path), "open"))


def await_no_lease(address: str) -> None:
    """Wait until the server has back what was closed: another thread tells it."""
    with connect_raw(address) as raw:
        await_true(lambda: not raw.inspect().leases)


@pytest.mark.parametrize("end", ["goes on", "is killed"])
def test_memory_that_a_stopped_reader_has_open_is_waited_for(
    workers: Crew, tmp_path: Path, end: str
) -> None:
    """It can let go of nothing, and its room is counted until it does or dies."""
    spec = Spec(folder=str(tmp_path))
    with serve_engine(spec, device_pool_size=2 * PAGE, slab_size=PAGE, pool_size="1MiB") as server:
        doomed, other = workers["doomed"], workers["other"]
        for worker in (doomed, other):
            worker.ask("connect", server.address, spec.dumps())
            worker.ask("open_scoring", transports=("cuda_ipc",))
        doomed.ask("score", [[1, 2, 3]])
        doomed.ask("close_scored")
        await_no_lease(server.address)
        doomed.stop()
        try:
            with pytest.raises(WorkerError, match=f"{PAGE} bytes of slabs") as caught:
                other.ask("score", [[7] * 80], timeout=0.5)
            assert caught.value.told.kind == "PoolFullError"
            other.start("score", [[7] * 80])
        finally:
            doomed.go_on() if end == "goes on" else doomed.kill()
        assert cast("dict[str, object]", other.answer())["transport"] == "cuda_ipc"
        workers.reset()
        assert faults(read_log(tmp_path)) == []


def test_a_fork_of_a_reader_keeps_nothing_open(node: Node) -> None:
    """Such as a loader of data, which lives on and has all descriptors of its parent."""
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("publish", 0)
    student.ask("read", 0)
    await_no_lease(node.address)  # what is out when a fork is made is the fork's as well
    student.ask("fork")
    student.ask("close_session")
    publisher.ask("close_publisher")

    await_true(lambda: publisher.ask("left_over") == 0)
    student.ask("end_fork")
