"""Ends of buffers that publishers own: what was closed is free, whatever other threads do."""

import errno
import fcntl
import os
import socket
import weakref
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import pytest
import torch
from tests.client.slabs.test_device_slabs import IDS, Owned, a_whole_claim, on_a_device
from tests.client.slabs.test_own_slabs import GOOD, LONG, SOON

from teacher_logits.devices.left_over import open_lock
from teacher_logits.errors import (
    ConfigError,
    DeadlinePassedError,
    NotAvailable,
    PayloadInvalidError,
    RequestInvalidError,
    ServerUnreachableError,
    SessionExpiredError,
)
from teacher_logits.pool import PAGE_BYTES
from teacher_logits_client.slabs.own_buffers import register


def test_a_buffer_in_which_room_was_taken_meanwhile_is_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread reserves there between the wait and the drop: its owner may not free it."""
    with on_a_device(tmp_path) as (way, _, memory):
        own = Owned(way, memory)
        drop = way.room.shelf.drop

        def reserves_first(slab_ids: Sequence[str]) -> None:
            monkeypatch.setattr(way.room.shelf, "drop", drop)
            way.reserve(own.claim(0, first_page=0), until=monotonic() + LONG)
            drop(slab_ids)

        monkeypatch.setattr(way.room.shelf, "drop", reserves_first)
        with pytest.raises(DeadlinePassedError):
            own.buffer.close(timeout=SOON)
        assert own.buffer.slab_id in way.registered
        way.abandon("p-0", until=monotonic() + LONG)
        own.buffer.close(timeout=LONG)
        assert not way.registered


def test_a_reserve_that_comes_after_the_close_is_refused(tmp_path: Path) -> None:
    with on_a_device(tmp_path) as (way, _, memory):
        own = Owned(way, memory)
        claim = own.claim(0, first_page=0)
        own.buffer.close(timeout=LONG)
        with pytest.raises(PayloadInvalidError, match="was closed"):
            way.reserve(claim, until=monotonic() + LONG)


def test_a_closed_buffer_is_free_and_may_be_closed_again(tmp_path: Path) -> None:
    with on_a_device(tmp_path) as (way, _, memory):
        own = Owned(way, memory)
        for _ in range(2):
            own.buffer.close(timeout=LONG)
            own.buffer.wait_free(timeout=LONG)


def test_a_closed_buffer_says_whether_a_reader_has_it_open(tmp_path: Path) -> None:
    """To free device memory under an open handle is undefined."""
    with on_a_device(tmp_path) as (way, _, memory):
        own = Owned(way, memory)
        reader = open_lock(way.room.shelf[own.buffer.slab_id].fd)
        fcntl.flock(reader, fcntl.LOCK_SH)
        own.buffer.close(timeout=LONG)
        assert own.buffer.is_open_elsewhere
        os.close(reader)
        assert not own.buffer.is_open_elsewhere


def test_a_wait_is_over_when_another_thread_has_closed_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_a_device(tmp_path) as (way, _, memory):
        own = Owned(way, memory)
        assert way.line is not None
        drain = way.line.drain

        def closed_meanwhile() -> None:
            monkeypatch.setattr(way.line, "drain", drain)
            own.buffer.close(timeout=LONG)

        monkeypatch.setattr(way.line, "drain", closed_meanwhile)
        own.buffer.wait_free(timeout=SOON)


def test_the_tensor_lives_as_long_as_it_is_registered(tmp_path: Path) -> None:
    """Else its allocator would have its address for another, which readers would not see."""
    with on_a_device(tmp_path) as (way, _, memory):
        own = Owned(way, memory)
        storage = weakref.ref(own.bytes)
        del own.bytes
        assert storage() is not None
        own.buffer.close(timeout=LONG)
        assert storage() is None


@pytest.mark.parametrize("timeout", [float("nan"), None, "soon", -1])
def test_a_wait_has_a_deadline(tmp_path: Path, timeout: float) -> None:
    with on_a_device(tmp_path) as (way, _, memory):
        buffer = Owned(way, memory).buffer
        for wait in (buffer.wait_free, buffer.close):
            with pytest.raises(ConfigError, match="timeout"):
                wait(timeout=timeout)


def test_memory_is_registered_once(tmp_path: Path) -> None:
    """What lies in one of two buffers would be written over in the other."""
    with on_a_device(tmp_path) as (way, _, memory):
        own = Owned(way, memory)
        for storage in (own.bytes, own.bytes[PAGE_BYTES:]):
            with pytest.raises(RequestInvalidError, match=own.buffer.slab_id):
                register(way, storage)
        own.buffer.close(timeout=LONG)
        register(way, own.bytes)


@pytest.mark.parametrize("given", [None, "cuda:0", [1], torch.eye(2).to_sparse()])
def test_what_is_no_tensor_is_no_buffer(tmp_path: Path, given: torch.Tensor) -> None:
    with on_a_device(tmp_path) as (way, _, _memory):
        with pytest.raises(RequestInvalidError, match=r"dense torch\.Tensor"):
            register(way, given)


def test_memory_of_a_pool_is_none_of_ones_own(tmp_path: Path) -> None:
    """Drafts are written there: what was registered would change under its readers."""
    with on_a_device(tmp_path) as (way, _, _memory):
        claim = a_whole_claim(0)
        draft = way.reserve(claim, until=monotonic() + LONG).room.tensors(claim.payload.columns)
        with pytest.raises(RequestInvalidError, match="own pool") as caught:
            register(way, draft[IDS])
        assert str(caught.value.facts["slab_id"]) in way.room.shelf


def test_a_system_without_descriptors_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with on_a_device(tmp_path) as (way, _, memory):
        own = Owned(way, memory)
        own.buffer.close(timeout=LONG)
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            with pytest.raises(NotAvailable, match=r"Too many open files.*ulimit -n"):
                register(way, own.bytes)
        register(way, own.bytes)


class TestABufferWhosePublisherWasClosed:
    def test_is_closed_where_nobody_may_read_it(self, tmp_path: Path) -> None:
        with on_a_device(tmp_path) as (way, _, memory):
            own = Owned(way, memory)
            way.close()
            own.buffer.wait_free(timeout=LONG)
            own.buffer.close(timeout=LONG)

    def test_says_that_it_is_kept_where_somebody_may(self, tmp_path: Path) -> None:
        with on_a_device(tmp_path) as (way, _, memory):
            own = Owned(way, memory)
            way.reserve(own.claim(0, first_page=0), until=monotonic() + LONG)
            way.seal("p-0", GOOD, until=monotonic() + LONG)
            way.close()
            for wait in (own.buffer.wait_free, own.buffer.close):
                with pytest.raises(SessionExpiredError, match="kept alive until this process ends"):
                    wait(timeout=LONG)

    def test_says_so_to_who_waits_for_it_on_another_thread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with on_a_device(tmp_path) as (way, _, memory):
            own = Owned(way, memory)
            way.reserve(own.claim(0, first_page=0), until=monotonic() + LONG)
            way.seal("p-0", GOOD, until=monotonic() + LONG)
            assert way.line is not None
            drain = way.line.drain

            def closed_meanwhile() -> None:
                monkeypatch.setattr(way.line, "drain", drain)
                way.close()

            monkeypatch.setattr(way.line, "drain", closed_meanwhile)
            with pytest.raises(SessionExpiredError, match="kept alive until this process ends"):
                own.buffer.close(timeout=LONG)

    def test_whose_line_has_ended_says_that(self, tmp_path: Path) -> None:
        """Its publisher is there yet, and its server is gone."""
        with on_a_device(tmp_path) as (way, desk, memory):
            own = Owned(way, memory)
            way.reserve(own.claim(0, first_page=0), until=monotonic() + LONG)
            way.seal("p-0", GOOD, until=monotonic() + LONG)
            desk.broker.socket.shutdown(socket.SHUT_RDWR)
            with pytest.raises(ServerUnreachableError):
                own.buffer.close(timeout=LONG)
