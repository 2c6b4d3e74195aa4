"""The generation of a room is looked at on the way in and on the way out.

Only an operator's force reuses a room under its reader; here the slot is marked as that would.
Readers that have a copy have all of it or nothing, and need no second look.
"""

import pytest
from tests.transport_suite.conftest import OpenSession
from tests.transport_suite.contents import ROWS, Content, every_kind
from tests.transport_suite.ways import WAYS, Way
from tests.transport_suite.writing import Embedded

import teacher_logits_client as tl
from teacher_logits.errors import StalePayloadError
from teacher_logits.layout import ElementType

IN_THE_WRITERS_ROOM = pytest.mark.parametrize("way", [w for w in WAYS if w.shares_room], ids=str)


@pytest.fixture
def content() -> Content:
    return every_kind(top_k=9, windows=ROWS["ragged"], element_type=ElementType.FLOAT32)


@IN_THE_WRITERS_ROOM
def test_room_that_was_reused_before_it_was_opened_is_refused(
    server: Embedded, open_session: OpenSession, way: Way, content: Content
) -> None:
    with server.sealed(content) as held, open_session(way, content) as session:
        server.force_reuse(held)
        with pytest.raises(StalePayloadError, match="generation") as caught:
            session.acquire(payload_id=held.payload.payload_id)
        expected = held.extent.generation
        assert caught.value.facts["generation"] == expected
        assert caught.value.facts["found_generation"] == expected + 2


@IN_THE_WRITERS_ROOM
def test_room_that_was_reused_while_it_was_read_is_found_at_the_end(
    server: Embedded,
    open_session: OpenSession,
    clients: tuple[tl.Client, tl.Client],
    way: Way,
    content: Content,
) -> None:
    stale_before = clients[0].statistics().stale_payloads
    with server.sealed(content) as held, open_session(way, content) as session:
        with pytest.raises(StalePayloadError, match="discard everything"):
            with session.acquire(payload_id=held.payload.payload_id):
                server.force_reuse(held)
    assert clients[0].statistics().stale_payloads == stale_before + 1


@IN_THE_WRITERS_ROOM
def test_room_that_is_being_written_anew_is_no_better(
    server: Embedded, open_session: OpenSession, way: Way, content: Content
) -> None:
    with server.sealed(content) as held, open_session(way, content) as session:
        with pytest.raises(StalePayloadError):
            with session.acquire(payload_id=held.payload.payload_id):
                server.core.slabs.mark(held.extent, held.extent.generation + 1)  # odd


@IN_THE_WRITERS_ROOM
def test_a_lease_that_saw_reused_room_is_given_back_all_the_same(
    server: Embedded, open_session: OpenSession, way: Way, content: Content
) -> None:
    held = server.seal(content)
    with open_session(way, content) as session:
        with pytest.raises(StalePayloadError):
            with session.acquire(payload_id=held.payload.payload_id):
                server.force_reuse(held)
        held.release()
        server.wait_until(lambda: server.usage.used_bytes == 0)


@IN_THE_WRITERS_ROOM
def test_an_error_of_the_users_own_does_not_hide_reused_room(
    server: Embedded, open_session: OpenSession, way: Way, content: Content
) -> None:
    def fail_in_reused_room() -> None:
        with session.acquire(payload_id=held.payload.payload_id):
            server.force_reuse(held)
            raise ZeroDivisionError

    with server.sealed(content) as held, open_session(way, content) as session:
        with pytest.raises(StalePayloadError) as caught:
            fail_in_reused_room()
        assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_a_copy_that_was_complete_in_time_minds_no_reuse(
    server: Embedded, open_session: OpenSession, way: Way, content: Content
) -> None:
    with (
        server.sealed(content) as held,
        open_session(way, content, mode=tl.MapMode.COPY) as session,
    ):
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            before = leased.digest()
            server.force_reuse(held)
            assert leased.digest() == before


def test_generations_rise_with_every_reuse_of_a_room(
    server: Embedded, open_session: OpenSession, way: Way, content: Content
) -> None:
    places = set()
    last = 0
    with open_session(way, content) as session:
        for _ in range(4):
            held = server.seal(content)
            session.acquire(payload_id=held.payload.payload_id).close()
            held.release()
            server.wait_until(lambda: server.usage.used_bytes == 0)
            places.add((held.extent.slab_id, held.extent.offset_bytes, held.extent.slot))
            assert held.extent.generation > last
            assert held.extent.generation % 2 == 0
            last = held.extent.generation
    assert len(places) == 1
