"""A writer that comes back: read through host copies until this side has proven its memory anew."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from tests.fake_cuda.faulty import Fault, gate, let_go
from tests.fake_cuda.visible import OTHER_GPU

if TYPE_CHECKING:
    from tests.cuda.node import Node
    from tests.cuda.workers import Worker

PATIENCE_SECONDS = 60.0


def transports(student: Worker) -> list[str]:
    """How a student's writers are settled by now, the last that came last."""
    told = cast("dict[str, dict[str, str]]", student.ask("terms"))
    return list(told["transports"].values())


def wait_until_settled(student: Worker, count: int, transport: str) -> None:
    """Wait until a student knows of so many writers, the last over a transport."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = transports(student)
        if len(found) == count and found[-1] == transport:
            return
        assert time.monotonic() < until, found


def test_it_is_read_at_once_and_over_its_device_as_soon_as_that_is_proven(node: Node) -> None:
    publisher = node.publisher()
    shut = gate(node.folder / "gate")
    held = Fault(call="open", hang=shut, after=2, times=1)  # behind a probe's, and a slab's
    student, terms = node.student(spec=node.spec(faults=(held,)), settings={"prefetch": 0})
    assert terms.transport == "cuda_ipc"
    publisher.ask("publish", 0)
    assert student.ask("read", 0) == ["cuda_ipc"]
    publisher.ask("close_publisher")

    again = node.publisher(name="again")
    again.ask("publish", 1)
    assert student.ask("read", 1) == ["shared_memory"]  # nobody waited for a driver
    let_go(shut)
    wait_until_settled(student, 2, "cuda_ipc")
    copies = len(node.done("copy_to_host", worker=again))
    again.ask("publish", 2, 3)

    assert student.ask("read", 2, 3) == ["cuda_ipc"]
    assert len(node.done("copy_to_host", worker=again)) == copies


def test_one_on_a_device_that_is_not_seen_stays_with_host_copies(node: Node) -> None:
    publisher = node.publisher()
    student, _ = node.student(settings={"prefetch": 0})
    publisher.ask("publish", 0)
    student.ask("read", 0)
    publisher.ask("close_publisher")

    again = node.publisher(name="again", spec=node.spec(devices=(OTHER_GPU,)))
    for step in (1, 2, 3):
        again.ask("publish", step)
        assert student.ask("read", step) == ["shared_memory"]
    assert transports(student)[-1] == "shared_memory"
