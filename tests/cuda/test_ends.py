"""Ends that nobody announces: a process dies with device memory open, and nothing is left behind.

What the dead one had is the driver's to take back, here the kernel's. What the others had of it
is theirs to give back.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cuda.censuses import await_mapped
from tests.cuda.node import Node
from tests.cuda.workers import WorkerError
from tests.fake_cuda.log import faults, still_open
from tests.processes.test_fifty_steps import Census, await_true

import teacher_logits_client as tl

if TYPE_CHECKING:
    from tests.cuda.workers import Crew


def test_a_killed_readers_room_is_written_anew(node: Node) -> None:
    """The pool holds one step, which the doomed one has and the other has read."""
    publisher = node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)
    settings = {"prefetch": 0}
    doomed, _ = node.student(name="doomed", transports=("cuda_ipc",), settings=settings)
    student, _ = node.student(student_id="other", transports=("cuda_ipc",), settings=settings)
    publisher.ask("publish", 0)
    doomed.ask("hold", 0)
    student.ask("read", 0)
    publisher.start("publish", 1)
    doomed.kill()
    publisher.answer()
    assert student.ask("read", 1) == ["cuda_ipc"]


def test_a_killed_publishers_memory_is_closed_by_its_readers(node: Node) -> None:
    publisher = node.publisher(name="doomed")
    student, _ = node.student(transports=("cuda_ipc", "shared_memory"), settings={"prefetch": 0})
    publisher.ask("publish", 0)
    student.ask("hold", 0)
    publisher.kill()
    student.ask("check", 0)
    student.ask("release", 0)
    successor = node.publisher()
    steps = iter(range(1, 1000))

    def reads_from_the_device() -> bool:
        step = next(steps)
        successor.ask("publish", step)
        return student.ask("read", step) == ["cuda_ipc"]

    await_true(reads_from_the_device)  # the first by host copies, until its memory is proven
    student.ask("close_session")
    await_mapped(student, 0)  # on the thread that gives leases back


def test_the_server_keeps_nothing_of_those_that_were_killed(
    node: Node, device_server: tl.testing.ServerProcess
) -> None:
    def kept() -> int:
        """Slabs that it has a descriptor of or mapped."""
        found = list(Census.of(device_server.pid).mappings)
        for each in Path(f"/proc/{device_server.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.append(str(each.readlink()))
        return sum("memfd:teacher-logits" in name for name in found)

    def is_let_go() -> bool:
        seen = node.inspect()
        return not (seen.sessions or seen.registered.slab_count)

    await_true(is_let_go)
    before = kept()
    for turn in range(3):
        publisher = node.publisher(name="doomed publisher")
        doomed, _ = node.student(name="doomed", student_id=f"doomed-{turn}")
        streamed, _ = node.student(student_id=f"streamed-{turn}", transports=("stream",))
        publisher.ask("publish", turn)
        doomed.ask("hold", turn)
        streamed.ask("read", turn)
        streamed.ask("close_session")
        (doomed if turn % 2 else publisher).kill()
        (publisher if turn % 2 else doomed).kill()
    await_true(is_let_go)
    await_true(lambda: kept() <= before)  # what was let go of just then is in `before`


@pytest.mark.slow
def test_a_killed_server_takes_nothing_along_that_was_leased(workers: Crew, tmp_path: Path) -> None:
    """What was leased stays good. The handle goes when the client has tried long enough."""
    with tl.testing.serve(pool_size="1MiB") as server:
        node = Node(address=server.address, crew=workers, folder=tmp_path)
        publisher = node.publisher(name="orphan")
        student, _ = node.student(transports=("cuda_ipc",), settings={"prefetch": 0})
        publisher.ask("publish", 0)
        student.ask("hold", 0)
    student.ask("check", 0)
    student.ask("release", 0)
    with pytest.raises(WorkerError) as caught:
        publisher.ask("publish", 1)
    assert caught.value.told.kind in ("SessionExpiredError", "ServerUnreachableError")
    student.ask("reset")
    await_true(lambda: not still_open(node.log()))
    publisher.kill()
    assert faults(node.log()) == []


def test_a_stopped_readers_memory_is_not_freed_under_it(node: Node) -> None:
    """The publisher waits for it a while, and then keeps the memory to its process's end."""
    publisher = node.crew["publisher"]
    publisher.ask("connect", node.address, node.spec().dumps(), timeout=3.0)
    publisher.ask("open_publisher", node.teaching)
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("publish", 0)
    student.ask("hold", 0)
    (slab,) = {each.serial for each in node.done("open", worker=student)} - {
        each.serial for each in node.done("close", worker=student)
    }
    student.stop()
    try:
        publisher.ask("close_publisher")
        assert slab not in {each.serial for each in node.done("free", worker=publisher)}
    finally:
        student.go_on()
    student.ask("check", 0)
    student.ask("stop_reading")
    publisher.kill()
