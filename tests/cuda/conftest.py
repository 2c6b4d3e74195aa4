"""One server and one crew of workers for each module; a node of its own for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cuda.node import Node
from tests.cuda.workers import Crew, crew

import teacher_logits_client as tl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def device_server() -> Iterator[tl.testing.ServerProcess]:
    """A server, which has no driver."""
    with tl.testing.serve(pool_size="16MiB") as server:
        yield server


@pytest.fixture(scope="session")
def all_workers() -> Iterator[Crew]:
    """Processes that publish and read."""
    with crew() as made:
        yield made


@pytest.fixture
def workers(all_workers: Crew) -> Iterator[Crew]:
    """The same, of which every test leaves none with something open."""
    yield all_workers
    all_workers.reset()


@pytest.fixture
def node(device_server: tl.testing.ServerProcess, workers: Crew, tmp_path: Path) -> Iterator[Node]:
    """A node on which every test leaves nothing behind."""
    made = Node(address=device_server.address, crew=workers, folder=tmp_path)
    yield made
    made.await_ends()
    workers.reset()
    made.assert_nothing_is_left(*workers.dead)
