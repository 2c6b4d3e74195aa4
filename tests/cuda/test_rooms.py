"""Device slabs come and go with what is published: retired ones are let go by every reader."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.cuda.censuses import await_mapped
from tests.fake_cuda.log import leaked
from tests.processes.test_fifty_steps import await_true

if TYPE_CHECKING:
    from tests.cuda.node import Node

PAGE = 4096


def test_an_arena_that_grows_five_times_leaves_no_old_slab_mapped(node: Node) -> None:
    """T53: each size needs a slab of its own, and the pool has room for one of them."""
    sizes = [450, 540, 620, 700, 780]
    publisher = node.publisher(
        node.teach(rows=1, row_tokens=(900,)), pool_size_bytes=11 * PAGE, slab_size_bytes=PAGE
    )
    student, _ = node.student(node.teach(rows=1, row_tokens=(900,)), transports=("cuda_ipc",))
    for step, positions in enumerate(sizes):
        publisher.ask("publish_window", step, positions)
        student.ask("read_window", step, positions)
        await_mapped(student, 1)
    slabs = [each.size_bytes for each in node.done("allocate") if each.size_bytes >= PAGE]
    assert len(slabs) >= len(sizes)
    opens = Counter(each.serial for each in node.done("open", worker=student))
    assert set(opens.values()) == {1}
    student.ask("close_session")
    publisher.ask("close_publisher")

    def is_all_closed() -> bool:
        return opens == Counter(each.serial for each in node.done("close", worker=student))

    await_true(is_all_closed)
    await_true(lambda: publisher.ask("left_over") == 0)
    assert leaked(node.log()) == set()
