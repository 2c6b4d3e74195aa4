"""Order: what a device still has to do is waited for, before a seal and before a room goes back.

The fake driver does what a stream was given only when somebody waits for it. So a wait that is
left out shows in the bytes: here late writes are those of the right step over another step's, and
late reads see whatever lies in the room by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from tests.cuda.censuses import await_mapped
from tests.processes.test_fifty_steps import await_true

if TYPE_CHECKING:
    from tests.cuda.node import Node


@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory", "stream"])
def test_a_seal_waits_for_what_the_writers_stream_was_given(node: Node, transport: str) -> None:
    """T07; host copies are taken behind the wait too."""
    publisher = node.publisher()
    student, _ = node.student(transports=(transport,))
    for step in range(3):
        publisher.ask("publish_late", step)
        assert student.ask("read", step) == [transport]


def test_every_publication_waits_and_not_only_the_first_of_a_slab(node: Node) -> None:
    """T07: what was mapped before is waited for as well; the room is the same each time."""
    publisher = node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)
    student, _ = node.student(transports=("cuda_ipc",))
    for step in range(8):
        publisher.ask("publish_late", step)
        assert student.ask("read", step) == ["cuda_ipc"]
    assert len(node.done("open", worker=student)) <= 2  # the probe, and one slab


def test_room_goes_back_only_behind_the_readers_last_read(node: Node) -> None:
    """The pool holds one step: the next is written where the last was, as soon as that may be."""
    publisher = node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)
    student, _ = node.student(transports=("cuda_ipc",), settings={"prefetch": 0})
    publisher.ask("publish", 0)
    publisher.start("publish", 1)
    student.ask("hold", 0)
    student.ask("read_late", 0, "topk_ids")
    student.ask("release", 0)
    publisher.answer()
    student.ask("read", 1)
    (seen,) = cast("list[list[int]]", student.ask("late"))
    right = node.teaching.right(0, range(node.teaching.rows))["topk_ids"]
    assert seen == right.flatten().tolist()


def test_room_is_kept_for_a_view_that_outlives_its_lease(node: Node) -> None:
    publisher = node.publisher(pool_size_bytes=4096, slab_size_bytes=4096)
    student, _ = node.student(transports=("cuda_ipc",), settings={"prefetch": 0})
    publisher.ask("publish", 0)
    publisher.start("publish", 1)  # waits for the room
    student.ask("hold", 0)
    student.ask("keep", 0, "topk_ids")
    student.ask("release", 0)
    assert student.ask("check_kept", 0, "topk_ids") is True
    student.ask("read_late_kept", 0, "topk_ids")
    await_true(lambda: statistics(student)["viewed_leases"] == 1)  # counted by another thread
    student.ask("drop", "topk_ids")
    publisher.answer()
    student.ask("read", 1)
    (seen,) = cast("list[list[int]]", student.ask("late"))
    right = node.teaching.right(0, range(node.teaching.rows))["topk_ids"]
    assert seen == right.flatten().tolist()


def test_a_view_outlives_session_and_slab_and_its_handle_is_closed_behind_it(node: Node) -> None:
    publisher = node.publisher()
    student, _ = node.student(transports=("cuda_ipc",))
    publisher.ask("publish", 0)
    student.ask("hold", 0)
    student.ask("keep", 0, "topk_ids")
    student.ask("release", 0)
    student.ask("close_session")
    publisher.start("close_publisher")  # waits for who still reads
    assert student.ask("check_kept", 0, "topk_ids") is True
    student.ask("drop", "topk_ids")
    student.ask("settle")
    # On the thread that gives leases back, which the client's end does not wait for.
    await_mapped(student, 0)
    publisher.answer()


def statistics(worker: object) -> dict[str, int]:
    """A worker's client's statistics."""
    return cast("dict[str, int]", worker.ask("statistics"))  # type: ignore[attr-defined]
