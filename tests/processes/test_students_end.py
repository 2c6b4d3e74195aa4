"""Students end, suddenly: their room goes to whoever waits for it, once nobody can read there.

The server has room for one payload. So a request that is answered shows that room came free, and
one that is not shows that it did not; nothing is looked at twice, and nobody sleeps.
"""

import os
from collections.abc import Iterator

import pytest
from tests.processes.running import PATIENCE_SECONDS, line_of, student
from tests.processes.student import ROWS, a_profile
from tests.reports.raw import connect_raw

import teacher_logits_client as tl
from teacher_logits.errors import DeadlinePassedError, PoolFullError
from teacher_logits_client import Transport

ONE_PAGE = 4096


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server with room for one payload."""
    with tl.testing.serve(
        pool_size=ONE_PAGE, slab_size=ONE_PAGE, session_ttl="3s", renew_interval="1s"
    ) as server:
        yield server.address


@pytest.fixture
def waiting(address: str) -> Iterator[tl.Session]:
    """A session of the test's own, which wants the room. It has a line and so no TTL."""
    with (
        tl.connect(address) as client,
        client.open_session(a_profile(Transport.SHARED_MEMORY)) as session,
    ):
        yield session


def assert_no_room(address: str) -> None:
    """The one page is taken, and not in quarantine."""
    with connect_raw(address) as raw:
        pool = raw.inspect().pool
    assert (pool.used_bytes, pool.quarantined_bytes, pool.free_bytes) == (ONE_PAGE, 0, 0)


def assert_refused_for_want_of_room(session: tl.Session) -> None:
    """A request waits for room as long as it may, and finds none."""
    with pytest.raises((PoolFullError, DeadlinePassedError)):
        session.score(ROWS, timeout=0.5).result()


def assert_room_comes(future: tl.ScoreFuture) -> None:
    """The request that waited for room is answered."""
    with future.result() as leased:
        assert leased.payload.row_count == len(ROWS)


def test_the_room_of_a_killed_student_is_free(address: str, waiting: tl.Session) -> None:
    with student("hold", address, "shared_memory") as reader:
        assert line_of(reader) == "held"
        assert_no_room(address)
        future = waiting.score(ROWS, timeout=PATIENCE_SECONDS)
        reader.kill()
        assert_room_comes(future)


def test_the_room_of_a_killed_student_that_streamed_is_free_when_its_ttl_has_passed(
    address: str, waiting: tl.Session
) -> None:
    with student("hold", address, "stream") as reader:
        assert line_of(reader) == "held"
        assert_no_room(address)
        future = waiting.score(ROWS, timeout=PATIENCE_SECONDS)
        reader.kill()
        assert_room_comes(future)


def test_a_forked_child_keeps_the_room_until_it_ends_too(address: str, waiting: tl.Session) -> None:
    leash_end, leash = os.pipe()
    with student("fork", address, str(leash_end), pass_fds=[leash_end]) as reader:
        os.close(leash_end)
        assert line_of(reader) == "held"
        reader.kill()
        reader.wait(PATIENCE_SECONDS)
        assert_refused_for_want_of_room(waiting)
        assert_no_room(address)
        future = waiting.score(ROWS, timeout=PATIENCE_SECONDS)
        os.close(leash)
        assert line_of(reader) == "intact"
        assert_room_comes(future)
