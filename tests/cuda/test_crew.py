"""The crew of these tests: what one test leaves behind is told of there, and is no other's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cuda.node import Node
from tests.cuda.workers import crew

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cuda.workers import Crew

    import teacher_logits_client as tl


@pytest.fixture
def left(device_server: tl.testing.ServerProcess, tmp_path: Path) -> Iterator[Node]:
    """A node with workers of its own, of which things are left behind."""
    with crew() as own:
        yield Node(address=device_server.address, crew=own, folder=tmp_path)


def reset(own: Crew) -> str:
    """What is said of the first reset; the second has nothing to say."""
    with pytest.raises(AssertionError) as caught:
        own.reset(read_within=0.1)
    own.reset()
    return str(caught.value)


def test_a_publisher_that_nobody_has_read_is_named_and_ended(left: Node) -> None:
    """Its close would wait for a reader longer than anybody waits for its answer."""
    publisher = left.publisher()
    publisher.ask("publish", 0)
    assert "publisher, stop_writing: what was published is still read" in reset(left.crew)
    assert publisher.pid in left.crew.dead
    left.assert_nothing_is_left(*left.crew.dead)


def test_one_that_fails_to_close_is_named_and_ended(left: Node) -> None:
    worker = left.worker("reader")
    worker.ask("fail_to_close")
    assert "reader, reset: " in reset(left.crew)
    assert left.crew["reader"].pid != worker.pid
