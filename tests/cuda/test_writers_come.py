"""A publisher that comes later is proven ahead of its steps, by students that are there already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cuda.workers import WorkerError
from tests.fake_cuda.faulty import Fault

if TYPE_CHECKING:
    from tests.cuda.node import Node


@pytest.mark.parametrize("locality", ["prefer", "require"])
def test_a_student_that_reads_devices_alone_goes_on_with_the_next_publisher(
    node: Node, locality: str
) -> None:
    first = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",), locality=locality)
    first.ask("publish", 0)
    assert student.ask("read", 0) == ["cuda_ipc"]
    first.ask("wait_free")
    first.ask("close_publisher")
    second = node.publisher(name="second")
    second.ask("publish", 1)

    assert student.ask("read", 1) == ["cuda_ipc"]


def test_a_student_that_cannot_open_the_next_publishers_device_is_told_so(node: Node) -> None:
    first = node.publisher()
    spec = node.spec(faults=(Fault(call="open", error=999, after=2),))  # the probe's, and a slab's
    student, _ = node.student(spec=spec, transports=("cuda_ipc",))
    first.ask("publish", 0)
    student.ask("read", 0)
    first.ask("wait_free")
    first.ask("close_publisher")
    second = node.publisher(name="second")
    second.ask("publish", 1)

    with pytest.raises(WorkerError) as caught:
        student.ask("read", 1)
    assert caught.value.told.kind == "NoCommonTransportError"
    assert caught.value.told.facts["cuda_ipc"] == "DRIVER_FAILED"
    second.kill()  # what nobody will read goes with it
