"""What a reader writes into its tensors stays with it, wherever its transport can keep it there."""

from collections.abc import Mapping

import pytest
import torch
from tests.transport_suite.conftest import OpenSession
from tests.transport_suite.contents import ROWS, Content, every_kind
from tests.transport_suite.ways import WAYS, Way
from tests.transport_suite.writing import PAGE_BYTES, Embedded

import teacher_logits_client as tl
from teacher_logits.errors import StalePayloadError
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.tensors import to_bytes

ISOLATING = pytest.mark.parametrize("way", [w for w in WAYS if w.isolates], ids=str)
OPEN_TO_WRITES = pytest.mark.parametrize("way", [w for w in WAYS if not w.isolates], ids=str)
IDS = ColumnKind.TOPK_IDS


def a_content(seed: int = 0) -> Content:
    """A payload of many pages."""
    return every_kind(
        top_k=1024, windows=ROWS["ragged"], element_type=ElementType.FLOAT32, seed=seed
    )


def spoil(columns: Mapping[str, torch.Tensor]) -> None:
    """Write into every column, in place, to its last byte."""
    for tensor in columns.values():
        tensor.view(torch.uint8).fill_(0xA5)


@ISOLATING
def test_in_place_writes_reach_neither_the_writer_nor_another_reader(
    server: Embedded, open_session: OpenSession, clients: tuple[tl.Client, tl.Client], way: Way
) -> None:
    content = a_content()
    with (
        server.sealed(content) as held,
        open_session(way, content) as session,
        open_session(way, content) as sibling,
        open_session(way, content, client=clients[1]) as stranger,
    ):
        with (
            session.acquire(payload_id=held.payload.payload_id) as spoilt,
            sibling.acquire(payload_id=held.payload.payload_id) as clean,
        ):
            spoil(spoilt.columns)
            assert to_bytes(clean.columns[IDS.value]) == content.data[IDS]
            with stranger.acquire(payload_id=held.payload.payload_id) as late:
                assert to_bytes(late.columns[IDS.value]) == content.data[IDS]
                assert late.digest() == clean.digest()
        for column in content.columns:
            assert server.room_bytes(held, column.kind) == content.data[column.kind]


@ISOLATING
def test_in_place_writes_are_gone_from_the_next_payload_in_the_same_room(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    first, second = a_content(seed=1), a_content(seed=2)
    with open_session(way, first) as session:
        with server.sealed(first) as held:
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                spoil(leased.columns)
        server.wait_until(lambda: server.usage.used_bytes == 0)
        place = held.extent
        with server.sealed(second) as held:
            assert held.extent.slab_id == place.slab_id
            assert held.extent.offset_bytes == place.offset_bytes
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                for column in second.columns:
                    assert to_bytes(leased.columns[column.kind.value]) == second.data[column.kind]


@ISOLATING
def test_in_place_writes_are_gone_when_the_same_payload_is_leased_again(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content = a_content()
    with server.sealed(content) as held, open_session(way, content) as session:
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            digest = leased.digest()
            spoil(leased.columns)
        with session.acquire(payload_id=held.payload.payload_id) as leased:
            assert leased.digest() == digest


@ISOLATING
def test_in_place_writes_of_one_page_leave_the_neighbours_room_alone(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    first, second = a_content(seed=1), a_content(seed=2)
    assert first.size_bytes > 4 * PAGE_BYTES
    with (
        server.sealed(first) as left,
        server.sealed(second) as right,
        open_session(way, first) as session,
        session.acquire(payload_id=left.payload.payload_id) as spoilt,
        session.acquire(payload_id=right.payload.payload_id) as clean,
    ):
        spoil(spoilt.columns)
        assert to_bytes(clean.columns[IDS.value]) == second.data[IDS]


@OPEN_TO_WRITES
def test_in_place_writes_that_nothing_keeps_apart_are_found_where_that_is_asked_for(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content = a_content()
    with (
        server.sealed(content) as held,
        open_session(way, content, check_digest=True) as session,
    ):
        with pytest.raises(StalePayloadError, match="changed"):
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                leased.columns[IDS.value][0, 0] += 1


@ISOLATING
def test_a_digest_check_at_the_end_finds_the_readers_own_writes_too(
    server: Embedded, open_session: OpenSession, way: Way
) -> None:
    content = a_content()
    with (
        server.sealed(content) as held,
        open_session(way, content, check_digest=True) as session,
    ):
        session.acquire(payload_id=held.payload.payload_id).close()
        with pytest.raises(StalePayloadError, match="changed"):
            with session.acquire(payload_id=held.payload.payload_id) as leased:
                leased.columns[IDS.value][-1, -1] += 1


def test_nothing_moves_in_the_writers_own_process(
    server: Embedded, open_session: OpenSession
) -> None:
    [way] = [each for each in WAYS if each.transport is tl.Transport.LOCAL]
    content = a_content()
    with server.sealed(content) as held, open_session(way, content) as session:
        with (
            session.acquire(payload_id=held.payload.payload_id) as leased,
            server.core.slabs.room(held.extent) as room,
        ):
            own = torch.frombuffer(room, dtype=torch.uint8)
            offset = held.payload.column(IDS).offset_bytes
            assert leased.columns[IDS.value].data_ptr() == own.data_ptr() + offset
            del own
