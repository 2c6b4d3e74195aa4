"""Writers of a step on several devices, and what else a publisher with a device may ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from tests.fake_cuda.visible import ONE_GPU, OTHER_GPU

from teacher_logits.layout import RowStatus

if TYPE_CHECKING:
    from tests.cuda.node import Node


@pytest.mark.parametrize(
    ("sees", "ways"),
    [
        ((OTHER_GPU, ONE_GPU), ["cuda_ipc"]),
        ((OTHER_GPU,), ["cuda_ipc", "shared_memory"]),
        ((), ["shared_memory"]),
    ],
    ids=["both", "one", "none"],
)
def test_each_writer_is_read_where_the_reader_sees_its_device(
    node: Node, sees: tuple[tuple[str, str, bool], ...], ways: list[str]
) -> None:
    teaching = node.teach(ranks=2)
    devices = (ONE_GPU, OTHER_GPU)
    writers = [
        node.publisher(
            teaching,
            name=name,
            rank=rank,
            spec=node.spec(devices=devices),
            device=f"cuda:{rank}",
        )
        for rank, name in enumerate(("publisher", "second"))
    ]
    student, terms = node.student(teaching, spec=node.spec(devices=sees))
    assert sorted(set(terms.transports.values()), key=str) == ways
    for step in range(3):
        for writer in writers:
            writer.ask("publish", step)
        assert student.ask("read", step) == ways


def test_a_publisher_that_streams_needs_no_device(node: Node) -> None:
    publisher = node.publisher(transports=("stream",))
    student, terms = node.student()
    assert terms.transport == "shared_memory"  # of the server's own slabs
    publisher.ask("publish", 0)
    assert student.ask("read", 0) == ["shared_memory"]


def test_a_row_with_a_nan_is_masked_on_the_device(node: Node) -> None:
    publisher = node.publisher()
    readers = [
        node.student(name=way, student_id=way, transports=(way,), settings={"prefetch": 0})[0]
        for way in ("cuda_ipc", "stream")
    ]
    publisher.ask("publish_with_bad_row", 0, 2)
    digests = set()
    for reader in readers:
        reader.ask("hold", 0)
        status = cast("list[int]", reader.ask("row_status", 0))
        assert status == [RowStatus.OK, RowStatus.OK, RowStatus.NAN, RowStatus.OK]
        digests.add(reader.ask("digest", 0))
        reader.ask("release", 0)
    assert len(digests) == 1
