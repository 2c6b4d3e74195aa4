"""A publisher's slabs on a device that made way, and that readers still have open."""

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest
from tests.client.slabs.test_device_slabs import a_whole_claim, on_a_device
from tests.client.slabs.test_own_slabs import LONG, SOON, a_claim
from tests.fake_cuda.driver import FakeCuda
from tests.fake_cuda.log import faults, leaked

from teacher_logits.devices.left_over import open_lock
from teacher_logits.errors import PoolFullError, SessionExpiredError
from teacher_logits.payload import Extent
from teacher_logits.pool import PAGE_BYTES
from teacher_logits_client.slabs.own_slabs import OwnSlabs
from teacher_logits_client.slabs.slab_shelf import PublisherSlab

if TYPE_CHECKING:
    from teacher_logits_client.slabs.claims import Granted


@contextmanager
def behind_a_reader(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float
) -> Iterator[tuple["Future[Granted]", int, FakeCuda]]:
    """A payload that needs the whole pool, and was refused memory that a reader has open."""
    refused: SimpleQueue[None] = SimpleQueue()

    with (
        on_a_device(folder, pages=2, slab_pages=1) as (way, _, memory),
        ThreadPoolExecutor(1) as pool,
    ):
        make = way.room.shelf.maker.make

        def make_and_tell(usual_bytes: int, least_bytes: int, *, until: float) -> PublisherSlab:
            try:
                return make(usual_bytes, least_bytes, until=until)
            except PoolFullError:
                refused.put(None)
                raise

        reader = _opened(way)
        monkeypatch.setattr(way.room.shelf.maker, "make", make_and_tell)
        waiting = pool.submit(
            way.reserve, a_claim(1, size_bytes=2 * PAGE_BYTES), until=monotonic() + seconds
        )
        refused.get(timeout=LONG)
        yield waiting, reader, memory


def _opened(way: OwnSlabs) -> int:
    """Have a slab open as a reader has, in which nothing lies any more."""
    way.reserve(a_claim(0), until=monotonic() + LONG)
    held = way.room.table.find("p-0")
    assert held is not None
    reader = open_lock(way.room.shelf[held.extent.slab_id].fd)
    fcntl.flock(reader, fcntl.LOCK_SH)
    way.abandon("p-0", until=monotonic() + LONG)
    return reader


def test_are_waited_for_until_the_readers_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says nothing meanwhile that might have it look again."""
    with behind_a_reader(tmp_path, monkeypatch, seconds=LONG) as (waiting, reader, memory):
        os.close(reader)
        assert waiting.result(LONG).reservation.payload_id == "p-1"
        assert faults(memory.log.operations) == []


def test_are_named_where_they_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with behind_a_reader(tmp_path, monkeypatch, seconds=SOON) as (waiting, reader, _):
        with pytest.raises(PoolFullError, match=r"in readers.*pool_size_bytes") as caught:
            waiting.result(LONG)
        assert caught.value.facts["left_over_bytes"] == PAGE_BYTES
        os.close(reader)


def test_one_that_is_passed_while_the_publisher_is_closed_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread: nobody would close it any more."""
    with on_a_device(tmp_path) as (way, _, memory):
        assert way.line is not None
        put_slab = way.line.put_slab

        def closed_meanwhile(*args: Any, **given: Any) -> None:
            put_slab(*args, **given)
            way.room.shelf.close()

        monkeypatch.setattr(way.line, "put_slab", closed_meanwhile)
        with pytest.raises(SessionExpiredError, match="closed meanwhile"):
            way.reserve(a_whole_claim(0), until=monotonic() + LONG)
        assert leaked(memory.log.operations) == set()


def test_room_that_goes_while_it_is_reserved_is_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_a_device(tmp_path) as (way, _, _memory):
        find = way.room.find

        def closed_meanwhile(*args: Any, **given: Any) -> Extent:
            extent = find(*args, **given)
            way.room.shelf.close()
            return extent

        monkeypatch.setattr(way.room, "find", closed_meanwhile)
        with pytest.raises(SessionExpiredError, match="closed meanwhile"):
            way.reserve(a_whole_claim(0), until=monotonic() + LONG)
