"""A payload's room: taken while it is read, free when its reader is done, and never under one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.transport_suite.conftest import OpenSession
from tests.transport_suite.contents import ROWS, Content, every_kind
from tests.transport_suite.ways import Way
from tests.transport_suite.writing import Embedded, Sealed

import teacher_logits_client as tl
from teacher_logits.errors import LeaseLostError, PayloadRetiredError
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.tensors import to_bytes

LOGSUMEXP = ColumnKind.LOGSUMEXP


def a_content(seed: int = 0) -> Content:
    """A payload whose bits depend on the seed, and whose size does not."""
    return every_kind(top_k=20, windows=ROWS["ragged"], element_type=ElementType.FLOAT16, seed=seed)


@contextmanager
def outliving_view(session: tl.Session, held: Sealed) -> Iterator[list[torch.Tensor]]:
    """Lease a payload and close the lease while a view of it is alive: the one in the list."""
    with pytest.warns(ResourceWarning, match="logsumexp"):
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            views = [leased.columns[LOGSUMEXP.value]]
    yield views


def test_is_free_once_writer_and_reader_are_done(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content = a_content()
    held = server.seal(content)
    with open_session(way, content) as session:
        leased = session.acquire(payload_id=held.payload.payload_id)
        held.release()
        assert server.usage.used_bytes == held.extent.size_bytes
        leased.close()
        server.wait_until(lambda: server.usage.used_bytes == 0)


def test_is_taken_while_one_of_two_readers_is_left(
    server: Embedded, open_session: OpenSession, clients: tuple[tl.Client, tl.Client], way: Way
) -> None:
    content = a_content()
    held = server.seal(content)
    with (
        open_session(way, content) as session,
        open_session(way, content, client=clients[1]) as other,
    ):
        first = session.acquire(payload_id=held.payload.payload_id)
        second = other.acquire(payload_id=held.payload.payload_id)
        held.release()
        first.close()
        session.close()  # waits until the server has the lease back
        assert server.usage.used_bytes == held.extent.size_bytes
        assert to_bytes(second.columns[LOGSUMEXP.value]) == content.data[LOGSUMEXP]
        second.close()
        server.wait_until(lambda: server.usage.used_bytes == 0)


def test_of_a_lease_closed_twice_is_given_back_once(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content = a_content()
    with server.sealed(content) as held, open_session(way, content) as session:
        leased = session.acquire(payload_id=held.payload.payload_id)
        again = session.acquire(payload_id=held.payload.payload_id)
        leased.close()
        leased.close()
        assert to_bytes(again.columns[LOGSUMEXP.value]) == content.data[LOGSUMEXP]
        again.close()


def test_is_given_back_with_the_session_that_was_closed_first(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content = a_content()
    held = server.seal(content)
    with open_session(way, content) as session:
        leased = session.acquire(payload_id=held.payload.payload_id)
    held.release()
    assert to_bytes(leased.columns[LOGSUMEXP.value]) == content.data[LOGSUMEXP]
    leased.close()


def test_holds_nothing_for_a_closed_lease_to_show(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content = a_content()
    with server.sealed(content) as held, open_session(way, content) as session:
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            columns = leased.columns
        with pytest.raises(LeaseLostError, match=leased.lease_id):
            columns[LOGSUMEXP.value]
        with pytest.raises(LeaseLostError, match=leased.lease_id):
            leased.digest()


def test_gives_no_new_lease_once_it_is_free(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content = a_content()
    with server.sealed(content) as held:
        pass
    with open_session(way, content) as session:
        with pytest.raises(PayloadRetiredError, match=held.payload.payload_id):
            session.acquire(payload_id=held.payload.payload_id)


def test_keeps_its_bytes_for_a_view_that_outlives_the_lease(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content, next_content = a_content(seed=1), a_content(seed=2)
    with open_session(way, content) as session:
        with server.sealed(content) as held, outliving_view(session, held) as views:
            pass
        # Nobody but the view is left. What comes next must not come into its memory.
        with server.sealed(next_content) as held:
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                got = to_bytes(leased.columns[LOGSUMEXP.value])
        assert got == next_content.data[LOGSUMEXP]
        assert to_bytes(views[0]) == content.data[LOGSUMEXP]
        views.clear()


def test_stays_taken_for_a_view_where_it_is_the_writers_own_and_not_for_a_copy(
    server: Embedded, open_session: OpenSession, clients: tuple[tl.Client, tl.Client], way: Way
) -> None:
    content = a_content()
    with open_session(way, content) as session:
        held = server.seal(content)
        with outliving_view(session, held) as views:
            held.release()
        kept = held.extent.size_bytes if way.shares_room else 0
        # The way back of a second lease: what the first would give back comes before it.
        with server.sealed(content) as other:
            session.acquire(payload_id=other.payload.payload_id).close()
        server.wait_until(lambda: server.usage.used_bytes == kept)
        assert clients[0].statistics().viewed_leases == 1
        views.clear()
        server.wait_until(lambda: server.usage.used_bytes == 0)


def test_stays_taken_while_a_graph_of_autograd_has_a_view(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    # Saved for the backward pass by an op on the view itself; finite numbers alone.
    content = a_content()
    weight = torch.ones((), requires_grad=True)
    with open_session(way, content) as session:
        held = server.seal(content)
        with pytest.warns(ResourceWarning, match="logsumexp"):
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                loss = (leased.columns[LOGSUMEXP.value] * weight).nan_to_num().sum()
        held.release()
        if way.shares_room:
            assert server.usage.used_bytes == held.extent.size_bytes
        loss.backward()
        del loss
        server.wait_until(lambda: server.usage.used_bytes == 0)
