"""Context-parallel ranks publish from device memory, and a student puts their parts together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cuda.node import Node


@pytest.mark.parametrize("way", ["cuda_ipc", "shared_memory"])
def test_parts_in_device_memory_are_read_as_whole_rows(node: Node, way: str) -> None:
    teaching = node.teach(context=2)
    publishers = [node.publisher(teaching, name=f"publisher{rank}", rank=rank) for rank in range(2)]
    student, _ = node.student(teaching, transports=(way,))
    for publisher in publishers:
        publisher.start("publish_part", 0, 1)
    assert student.ask("read", 0, 1) == [way]
    for publisher in publishers:
        publisher.answer()
