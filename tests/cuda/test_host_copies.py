"""Host copies: device memory is copied for readers that cannot open it, and for them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cuda.workers import WorkerError
from tests.fake_cuda.faulty import Fault

import teacher_logits_client as tl

if TYPE_CHECKING:
    from tests.cuda.node import Node


def test_a_publisher_whose_readers_all_open_devices_copies_nothing(node: Node) -> None:
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("publish", *range(4))
    student.ask("read", *range(4))
    assert node.done("copy_to_host", worker=publisher) == []


def test_host_copies_are_made_for_everybody_where_that_was_asked_for(node: Node) -> None:
    publisher = node.publisher(host_copies="always")
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("publish", 0)
    student.ask("read", 0)
    late, _ = node.student(name="stream", student_id="late", transports=("shared_memory",))
    assert node.done("copy_to_host", worker=publisher) != []
    publisher.ask("publish", 1)
    assert student.ask("read", 1) == ["cuda_ipc"]
    assert late.ask("read", 1) == ["shared_memory"]


def test_a_reader_that_comes_late_has_copies_of_what_is_sealed_from_then_on(node: Node) -> None:
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",), settings={"prefetch": 0})
    publisher.ask("publish", 0)
    late, _ = node.student(name="stream", student_id="late", transports=("stream",))
    with pytest.raises(WorkerError) as caught:
        late.ask("read", 0)
    assert caught.value.told.kind == "HostCopyNeededError"
    assert "host_copies" in caught.value.told.message
    publisher.ask("publish", 1)
    assert student.ask("read", 0, 1) == ["cuda_ipc"]
    assert late.ask("read", 1) == ["stream"]
    late.ask("stop_reading")  # nobody else waits for it any more


def test_a_step_that_a_late_reader_cannot_read_does_not_wait_for_it(node: Node) -> None:
    publisher = node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)
    student, _ = node.student(transports=("cuda_ipc",), settings={"prefetch": 0})
    publisher.ask("publish", 0)
    late, _ = node.student(name="stream", student_id="late", transports=("stream",))
    with pytest.raises(WorkerError):
        late.ask("read", 0)
    student.ask("read", 0)
    publisher.ask("publish", 1)  # where step 0 was
    assert student.ask("read", 1) == ["cuda_ipc"]
    assert late.ask("read", 1) == ["stream"]


def test_a_reader_whose_device_breaks_later_is_told_and_never_reads_zeros(node: Node) -> None:
    """The trial open was fine, and the slab's is not; the copy that it needs now was not made."""
    publisher = node.publisher()
    spec = node.spec(faults=(Fault(call="open", error=999, after=1),))
    student, terms = node.student(spec=spec, transports=("cuda_ipc", "stream"))
    assert terms.transport == "cuda_ipc"
    publisher.ask("publish", 0)
    with pytest.raises(WorkerError) as caught:
        student.ask("read", 0)
    assert caught.value.told.kind != "broken", caught.value.told.message
    publisher.ask("publish", 1)
    assert student.ask("read", 1) == ["stream"]
    publisher.kill()  # step 0 waits for its reader: the memory is kept to the end


def test_the_ranks_of_one_grid_may_each_read_another_way(node: Node) -> None:
    teaching = node.teach(rows=3)
    publisher = node.publisher(teaching)
    grid = tl.BatchGrid(global_batch_size=3, data_parallel_size=3, micro_batch_size=1)
    ways = ("cuda_ipc", "shared_memory", "stream")
    ranks = [
        node.student(
            teaching, name=way, batch_grid=grid, data_parallel_rank=rank, transports=(way,)
        )[0]
        for rank, way in enumerate(ways)
    ]
    publisher.ask("publish", *range(3))
    for rank, way in enumerate(ways):
        assert ranks[rank].ask("read_rows", [rank], 0, 1, 2) == [way]


@pytest.mark.parametrize("value_type", ["bfloat16", "float32"])
@pytest.mark.parametrize("transport", ["shared_memory", "stream"])
def test_the_whole_vocabulary_and_empty_rows_are_copied_bit_by_bit(
    node: Node, value_type: str, transport: str
) -> None:
    """K is V: there is no tail."""
    teaching = node.teach(value_type=value_type, top_k=61, empty_every=2)
    publisher = node.publisher(teaching)
    student, _ = node.student(teaching, transports=(transport,))
    publisher.ask("publish", 0, 1)
    assert student.ask("read", 0, 1) == [transport]
