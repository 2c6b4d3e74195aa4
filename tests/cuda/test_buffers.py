"""Publishers that own their memory: one buffer, registered once, then named by offsets."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.cuda.workers import WorkerError

if TYPE_CHECKING:
    from tests.cuda.node import Node

BUFFER_BYTES = 16 << 10


@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory", "stream"])
def test_what_lies_in_a_registered_buffer_is_read_where_it_lies(node: Node, transport: str) -> None:
    publisher = node.publisher()
    student, _ = node.student(transports=(transport,))
    publisher.ask("allocate_buffer", BUFFER_BYTES)
    publisher.ask("register")
    for step in range(5):
        publisher.ask("publish_placed", step)
        assert student.ask("read", step) == [transport]
    (buffer,) = {each.serial for each in node.done("allocate") if each.size_bytes == BUFFER_BYTES}
    exported = Counter(each.serial for each in node.done("export"))
    assert exported[buffer] == 1
    opened = Counter(each.serial for each in node.done("open", worker=student))
    assert opened[buffer] == (1 if transport == "cuda_ipc" else 0)
    publisher.ask("close_buffer")


@pytest.mark.parametrize(
    ("kind", "way_out"),
    [
        ("VIRTUAL", "expandable_segments:False"),
        ("POOL", "cudaMallocAsync"),
        ("MANAGED", "cudaMallocManaged"),
        ("HOST", "device"),
    ],
)
def test_memory_that_cannot_be_handed_over_is_refused_with_the_setting_to_change(
    node: Node, kind: str, way_out: str
) -> None:
    """T14: found by what the driver says of the address, before anything is sent."""
    publisher = node.publisher()
    publisher.ask("allocate_buffer", BUFFER_BYTES, kind)
    with pytest.raises(WorkerError) as caught:
        publisher.ask("register")
    assert caught.value.told.kind == "RequestInvalidError"
    assert way_out in caught.value.told.message
    assert len(node.done("export")) == 1  # the probe


@pytest.mark.parametrize("kind", ["VIRTUAL", "POOL"])
def test_a_teacher_of_such_memory_hands_over_by_slabs_all_the_same(node: Node, kind: str) -> None:
    """R38: what it writes into a draft lies in plain memory, whatever its own allocator does."""
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("allocate_buffer", BUFFER_BYTES, kind)
    with pytest.raises(WorkerError):
        publisher.ask("register")
    publisher.ask("publish", 0)
    assert student.ask("read", 0) == ["cuda_ipc"]
