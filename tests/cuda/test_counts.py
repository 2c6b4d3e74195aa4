"""Many payloads, few handles: memory is exported once, opened once a session, and all of it closed.

What the drivers were asked, in every process, is the oracle.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

import pytest
from tests.fake_cuda.log import still_allocated, still_open

if TYPE_CHECKING:
    from tests.cuda.node import Node
    from tests.cuda.workers import Worker

WAYS = ("cuda_ipc", "shared_memory", "stream")
"""Names of workers that other tests have too: each is a process."""


def census(worker: Worker) -> dict[str, int]:
    """What a worker has open and mapped."""
    return cast("dict[str, int]", worker.ask("census"))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(60, id="60-payloads"),
        pytest.param(1000, id="1000-payloads", marks=[pytest.mark.slow, pytest.mark.timeout(180)]),
    ],
)
def test_handles_are_as_many_as_slabs_however_many_payloads_there_are(
    node: Node, steps: int
) -> None:
    publisher = node.publisher()
    students = [
        node.student(name=WAYS[number], student_id=f"student-{number}", transports=("cuda_ipc",))
        for number in range(3)
    ]
    assert {terms.transport for _, terms in students} == {"cuda_ipc"}
    readers = [worker for worker, _ in students]
    before = []
    for end in (10, steps):
        begin = 0 if end == 10 else 10
        for worker in (publisher, *readers):
            worker.start("publish" if worker is publisher else "read", *range(begin, end))
        for worker in readers:
            assert worker.answer() == ["cuda_ipc"]
        publisher.answer()
        before.append([census(worker) for worker in (publisher, *readers)])
    assert before[0] == before[1]

    allocated = {each.serial for each in node.done("allocate")}
    exported = Counter(each.serial for each in node.done("export"))
    assert exported == Counter(allocated)
    opened = Counter((each.pid, each.serial) for each in node.done("open"))
    assert opened == Counter((reader.pid, serial) for reader in readers for serial in allocated)

    for reader in readers:
        reader.ask("close_session")
    publisher.ask("close_publisher")
    log = node.log()
    assert (still_open(log), still_allocated(log)) == (Counter(), set())
    pids = {reader.pid for reader in readers}
    assert {each.pid for each in log if each.call == "open"} == pids


def test_two_sessions_of_one_process_open_a_slab_once_each(node: Node) -> None:
    """The driver counts: both see it at one address, until the second closes it."""
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",))
    student.ask("open_session", node.teaching, student_id="second", transports=("cuda_ipc",))
    publisher.ask("publish", 0, 1)
    addresses = set()
    for _ in range(2):
        student.ask("hold", 0)
        addresses.add(student.ask("keep", 0, "topk_ids"))
        student.ask("drop", "topk_ids")
        student.ask("release", 0)
        student.ask("switch_session")
    assert len(addresses) == 1
    (slab,) = {each.serial for each in node.done("open")} - probes(node)
    assert still_open(node.log()) == Counter({(student.pid, slab): 2})
    student.ask("close_session")
    assert still_open(node.log()) == Counter({(student.pid, slab): 1})
    student.ask("switch_session")
    assert student.ask("read", 1) == ["cuda_ipc"]
    student.ask("close_session")
    assert still_open(node.log()) == Counter()


def test_the_server_relays_handles_and_opens_nothing(node: Node) -> None:
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("publish", 0)
    student.ask("read", 0)
    assert {each.pid for each in node.log()} == {publisher.pid, student.pid}
    (handle,) = {each.serial for each in node.done("open")} - probes(node)
    assert handle in {each.serial for each in node.done("export", worker=publisher)}


def probes(node: Node) -> set[str]:
    """Allocations that are too small to be slabs: what readers open on trial."""
    return {each.serial for each in node.done("allocate") if each.size_bytes < 64 << 10}
