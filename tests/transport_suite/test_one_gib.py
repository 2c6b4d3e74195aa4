"""A GiB in one payload, once over each transport, and by a client that is none of ours."""

from collections.abc import Iterator

import crc32c
import grpc
import pytest
import torch
from tests.transport_suite.contents import TEMPERATURES, every_kind
from tests.transport_suite.dense_teacher import VOCABULARY_SIZE
from tests.transport_suite.ways import WAYS, Way
from tests.transport_suite.writing import Embedded, Sealed, a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits import keys
from teacher_logits.digest import payload_digest
from teacher_logits.layout import Column, ColumnKind, ElementType, lay_out
from teacher_logits.payload import Payload
from teacher_logits.profiles import SCORED_COLUMNS
from teacher_logits.tensors import column_tensor
from teacher_logits.v1 import bulk_service_pb2, bulk_service_pb2_grpc

GIB = 1 << 30
POSITIONS = 64
TIMEOUT_SECONDS = 60
GRPC_DEFAULT_LIMIT_BYTES = 4 << 20


@pytest.fixture(scope="module")
def large_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    folder = tmp_path_factory.mktemp("large")
    with embedded_server(folder, pool_bytes=GIB + (4 << 20)) as server:
        yield server


@pytest.fixture(scope="module")
def held(large_server: Embedded) -> Iterator[Sealed]:
    """A payload with one column of a GiB, each of whose words is another."""
    small = every_kind(top_k=1, windows=((0, POSITIONS),), element_type=ElementType.FLOAT32).columns
    shapes = {column.kind: (column.element_type, column.shape) for column in small}
    specs = [(kind, *shapes[kind]) for kind in SCORED_COLUMNS]
    wide = (ColumnKind.HIDDEN_STATES, ElementType.FLOAT32, (POSITIONS, GIB // 4 // POSITIONS))
    columns, size_bytes = lay_out([*specs, wide])
    payload = Payload(
        payload_id=keys.new_id("p", large_server.core.ledger.epoch),
        teacher_id="teacher",
        teacher_revision="1",
        first_row=0,
        row_count=1,
        position_count=POSITIONS,
        top_k=1,
        temperatures=TEMPERATURES,
        vocabulary_size=VOCABULARY_SIZE,
        columns=columns,
        size_bytes=size_bytes,
    )
    core = large_server.core
    extent = core.slabs.room_for(core.ledger, size_bytes)
    with core.slabs.room(extent) as room:
        for column in columns:
            _fill(column_tensor(room, column))
    sealed = large_server.publish(payload, extent)
    yield sealed
    sealed.release()


def _fill(tensor: torch.Tensor) -> None:
    """Number the words of a column, so that each differs from every other."""
    words = _words(tensor)
    torch.arange(len(words), dtype=torch.int32, out=words)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    elements = tensor.view(-1).view(torch.uint8)
    return elements[: len(elements) // 4 * 4].view(torch.int32)


def _digest(data: memoryview, columns: tuple[Column, ...]) -> str:
    return payload_digest(
        (c.kind.value, c.element_type.value, c.shape, data[c.offset_bytes : c.end_bytes])
        for c in columns
    )


@pytest.fixture(scope="module")
def client(large_server: Embedded) -> Iterator[tl.Client]:
    with tl.connect(large_server.address) as connected:
        yield connected


def a_profile_over(transport: tl.Transport) -> tl.StudentProfile:
    return a_profile(top_k=1, temperatures=TEMPERATURES[1:], transports=(transport,))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_gib_comes_whole(
    large_server: Embedded, held: Sealed, client: tl.Client, way: Way
) -> None:
    with (
        client.open_session(a_profile_over(way.transport)) as session,
        session.acquire(payload_id=held.payload.payload_id, timeout=TIMEOUT_SECONDS) as leased,
        large_server.core.slabs.room(held.extent) as room,
    ):
        assert leased.transport is way.transport
        assert leased.payload.size_bytes > GIB
        for column in held.payload.columns:
            got = leased.columns[column.kind.value]
            assert torch.equal(_words(got), _words(column_tensor(room, column)))
            del got


def test_a_gib_comes_whole_through_a_stock_channel_without_options(
    large_server: Embedded, held: Sealed, client: tl.Client
) -> None:
    data = memoryview(bytearray(held.payload.size_bytes))
    with (
        client.open_session(a_profile_over(tl.Transport.STREAM)) as session,
        grpc.insecure_channel(large_server.address) as channel,
    ):
        session_id = session.terms.session_id
        lease = large_server.core.ledger.acquire(
            session_id=session_id, request_id="stock", payload_id=held.payload.payload_id
        )
        request = bulk_service_pb2.ReadPayloadRequest(
            session_id=session_id, lease_id=lease.lease_id
        )
        stub = bulk_service_pb2_grpc.BulkServiceStub(channel)
        end = 0
        for chunk in stub.ReadPayload(request, timeout=TIMEOUT_SECONDS):
            part = chunk.data
            assert len(part) < GRPC_DEFAULT_LIMIT_BYTES
            assert (chunk.offset_bytes, chunk.crc32c) == (end, crc32c.crc32c(part))
            data[end : end + len(part)] = part
            end += len(part)
    assert end == held.payload.size_bytes
    with large_server.core.slabs.room(held.extent) as room:
        assert _digest(data, held.payload.columns) == _digest(room, held.payload.columns)
