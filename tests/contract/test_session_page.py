"""The page by which a local reader proves itself, and learns what was taken back by force."""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.errors import SlabOpenError
from teacher_logits.session_page import (
    CAPACITY,
    CHALLENGE_BYTES,
    PAGE_BYTES,
    ReaderPage,
    WriterPage,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

lease_ids = st.text(min_size=1, max_size=40)


@contextmanager
def a_page() -> Iterator[tuple[WriterPage, ReaderPage]]:
    """A page with both its ends, the reader's over the descriptor."""
    writer = WriterPage()
    fd = writer.take_fd()
    try:
        yield writer, ReaderPage(fd, CHALLENGE_BYTES)
    finally:
        os.close(fd)


def test_its_challenge_is_fresh_and_read_by_who_has_the_descriptor() -> None:
    with a_page() as (one, reader), a_page() as (other, _):
        assert reader.challenge == one.challenge != other.challenge


def test_nobody_else_can_write_to_it_or_cut_it() -> None:
    fd = WriterPage().take_fd()
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, PAGE_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE | mmap.PROT_READ)
    os.close(fd)


@given(st.lists(lease_ids, max_size=20, unique=True), st.lists(lease_ids, max_size=20))
def test_tells_the_leases_that_were_taken_back_from_all_others(
    taken: list[str], others: list[str]
) -> None:
    with a_page() as (writer, reader):
        for lease_id in taken:
            assert not reader.is_revoked(lease_id)
            writer.revoke(lease_id)

        assert all(map(reader.is_revoked, taken))
        assert not any(reader.is_revoked(lease_id) for lease_id in set(others) - set(taken))


def test_one_that_overflows_says_so_of_every_lease() -> None:
    with a_page() as (writer, reader):
        for number in range(CAPACITY):
            writer.revoke(f"l-{number}")
        assert reader.is_revoked(f"l-{CAPACITY - 1}")
        assert not reader.is_revoked("another")

        writer.revoke("one too many")
        assert reader.is_revoked("one too many")
        assert reader.is_revoked("another")


@pytest.mark.parametrize(("size", "challenge"), [(100, 32), (PAGE_BYTES, 0), (PAGE_BYTES, 65)])
def test_what_is_no_such_page_is_refused(size: int, challenge: int) -> None:
    fd = os.memfd_create("no-page")
    os.ftruncate(fd, size)
    with pytest.raises(SlabOpenError, match="page"):
        ReaderPage(fd, challenge)
    os.close(fd)
