"""Many payloads, few handles: memory is exported once, opened once a session, and all of it closed.

What the drivers were asked, in every process, is the oracle.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.cuda.censuses import await_no_more_than, settled_census
from tests.fake_cuda.log import leaked, probes, still_open
from tests.processes.test_fifty_steps import await_true

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.cuda.node import Node
    from tests.cuda.workers import Worker

WAYS = ("cuda_ipc", "shared_memory", "stream")
"""Names of workers that other tests have too: each is a process."""

STEPS_AT_ONCE = 100
"""So many are asked for before an answer is waited for."""


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(60, id="60-payloads"),
        pytest.param(1000, id="1000-payloads", marks=pytest.mark.slow),
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
    everybody = (publisher, *readers)
    hand_over(publisher, readers, range(10))
    before = [settled_census(worker) for worker in everybody]
    for begin in range(10, steps, STEPS_AT_ONCE):
        hand_over(publisher, readers, range(begin, min(begin + STEPS_AT_ONCE, steps)))
    await_no_more_than(everybody, before)

    allocated = {each.serial for each in node.done("allocate")}
    exported = Counter(each.serial for each in node.done("export"))
    assert exported == Counter(allocated)
    opened = Counter((each.pid, each.serial) for each in node.done("open"))
    assert opened == Counter((reader.pid, serial) for reader in readers for serial in allocated)

    for reader in readers:
        reader.ask("close_session")
    publisher.ask("close_publisher")
    await_true(lambda: not still_open(node.log()))
    await_true(lambda: publisher.ask("left_over") == 0)
    assert leaked(node.log()) == set()
    pids = {reader.pid for reader in readers}
    assert {each.pid for each in node.log() if each.call == "open"} == pids


def hand_over(publisher: Worker, readers: Sequence[Worker], steps: range) -> None:
    """Publish some steps while all readers read them."""
    for worker in (publisher, *readers):
        worker.start("publish" if worker is publisher else "read", *steps)
    for worker in readers:
        assert worker.answer() == ["cuda_ipc"]
    publisher.answer()


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
    (slab,) = opened_slabs(node)
    await_true(lambda: still_open(node.log()) == Counter({(student.pid, slab): 2}))
    student.ask("close_session")
    await_true(lambda: still_open(node.log()) == Counter({(student.pid, slab): 1}))
    student.ask("switch_session")
    assert student.ask("read", 1) == ["cuda_ipc"]
    student.ask("close_session")
    await_true(lambda: not still_open(node.log()))


def test_the_server_relays_handles_and_opens_nothing(node: Node) -> None:
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("publish", 0)
    student.ask("read", 0)
    assert {each.pid for each in node.log()} == {publisher.pid, student.pid}
    (handle,) = opened_slabs(node)
    assert handle in {each.serial for each in node.done("export", worker=publisher)}


def opened_slabs(node: Node) -> set[str]:
    """Allocations that were opened, but for what was opened on trial."""
    tried = {serial for _, serial in probes(node.log())}
    return {each.serial for each in node.done("open")} - tried
