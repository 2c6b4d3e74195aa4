"""The probe that readers open on trial: one a process, and never freed under a reader."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from tests.cuda.workers import WorkerError
from tests.fake_cuda.faulty import Fault, gate, is_held, let_go
from tests.fake_cuda.log import probes, still_allocated, still_open
from tests.processes.test_fifty_steps import await_true

if TYPE_CHECKING:
    from tests.cuda.node import Node


@pytest.mark.parametrize("call", ["open", "copy_to_host", "close"])
def test_a_reader_in_its_trial_open_has_it_although_its_publisher_is_closed(
    node: Node, call: str
) -> None:
    """Whatever the reader's driver is at when the publisher ends, the memory stays."""
    publisher = node.publisher()
    shut = gate(node.folder / "gate")
    student = node.worker("held", node.spec(faults=(Fault(call=call, hang=shut, times=1),)))
    student.start("open_session", node.teaching, transports=("cuda_ipc", "shared_memory"))
    await_true(lambda: is_held(shut))

    publisher.ask("close_publisher")
    let_go(shut)
    with suppress(WorkerError):  # what is left to be admitted to is not the question here
        student.answer()

    await_true(lambda: bool(node.done("close", worker=student)))
    assert node.done("free", worker=publisher) == []
    assert not still_open(node.log())


def test_the_next_publisher_of_a_process_shows_the_same(node: Node) -> None:
    """However many come and go, a process keeps one."""
    student = node.worker("student")
    publisher = node.worker("publisher")
    for turn in range(3):
        publisher.ask("open_publisher", node.teaching)
        student.ask("open_session", node.teaching, transports=("cuda_ipc",))
        publisher.ask("publish", turn)
        assert student.ask("read", turn) == ["cuda_ipc"]
        student.ask("close_session")
        publisher.ask("close_publisher")

    await_true(lambda: publisher.ask("left_over") == 0)
    log = node.log()
    assert len(probes(log)) == 1
    assert still_allocated(log) == probes(log)


def test_a_publisher_that_comes_back_in_its_process_is_proven_anew(node: Node) -> None:
    """The student has tried that very handle, as another writer's."""
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",), settings={"prefetch": 0})
    publisher.ask("publish", 0)
    student.ask("read", 0)
    publisher.ask("close_publisher")
    publisher.ask("open_publisher", node.teaching)
    publisher.ask("publish", 1)

    assert student.ask("read", 1) == ["cuda_ipc"]
    assert len(probes(node.log())) == 1
