"""A client that speaks the first release's schema alone, against the newest server."""

import os
from array import array
from collections.abc import Iterator
from typing import Any

import crc32c
import grpc
import pytest
from tests.compat.first_client import FirstClient, Session, grid, make_slab, request_id
from tests.compat.schemas import FIRST
from tests.server.services import registry_rig as rig
from tests.transport_suite.dense_teacher import DenseTeacher
from tests.transport_suite.right import RAGGED, answer
from tests.transport_suite.writing import embedded_server

from teacher_logits.wire.payloads import payload_to_wire

REJECT = FIRST.value("BadRowPolicy", "BAD_ROW_POLICY_REJECT")
TOPK_IDS = FIRST.value("ColumnKind", "COLUMN_KIND_TOPK_IDS")
FLOAT16 = FIRST.value("ElementType", "ELEMENT_TYPE_FLOAT16")
SLAB_BYTES = 256 * 1024
BOTH_WAYS = pytest.mark.parametrize("shares", [True, False], ids=["shared_memory", "stream"])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstClient]:
    folder = tmp_path_factory.mktemp("newest")
    with embedded_server(folder, pool_bytes=4 << 20, engine=DenseTeacher()) as server:
        with grpc.insecure_channel(server.address) as channel:
            yield FirstClient(channel)


def score(session: Session) -> Any:
    """Have the ragged rows scored; return the lease."""
    ids = array("i", [token for row in RAGGED for token in row])
    return session.call(
        "ScoringService/Score",
        request_id=request_id(),
        input_ids=ids.tobytes(),
        row_lengths=[len(row) for row in RAGGED],
        bad_rows=REJECT,
    ).lease


def assert_right(lease: Any, data: bytes) -> None:
    """The ids of every position are those of the teacher."""
    payload = lease.payload
    assert payload.position_count == sum(map(len, RAGGED))
    (column,) = [each for each in payload.columns if each.kind == TOPK_IDS]
    assert list(column.shape) == [payload.position_count, 8]
    found = array("i", data[column.offset_bytes :][: 4 * payload.position_count * 8])
    given = {"top_k": 8, "temperatures": (1.0,), "vocabulary_size": 1500}
    right = [answer(row, **given).ids.flatten().tolist() for row in RAGGED]  # type: ignore[arg-type]
    assert found.tolist() == [each for row in right for each in row]


@BOTH_WAYS
def test_it_has_rows_scored_and_reads_them(client: FirstClient, shares: bool) -> None:
    with client.student(shares=shares, teacher_id="teacher") as session:
        lease = score(session)
        assert lease.WhichOneof("source") == ("slab" if shares else "stream")
        assert_right(lease, session.read(lease))
        session.call("TeacherLogitsService/ReleasePayload", lease_id=lease.lease_id)


def test_it_acquires_renews_and_releases_over_its_line(client: FirstClient) -> None:
    with client.student(shares=True, teacher_id="teacher") as session:
        assert session.line is not None
        own, lease = {"session_id": session.session_id}, score(session)
        asked = {"request_id": request_id(), "payload_id": lease.payload.payload_id}
        again = session.line.call(acquire=own | asked).acquire.lease
        assert_right(again, session.read(again))
        for each in (again, lease):
            session.line.call(release=own | {"lease_id": each.lease_id})
        assert session.line.call(renew=own).WhichOneof("body") == "renew"
        assert not session.call("TeacherLogitsService/RenewSession").draining


def test_it_has_the_codec_that_it_asks_for(client: FirstClient) -> None:
    codec = FIRST.value("ValueCodec", "VALUE_CODEC_UINT8")
    with client.student(shares=False, teacher_id="teacher", value_codecs=[codec]) as session:
        assert session.settled.stream.values == codec
        lease = score(session)
        assert lease.stream.values == codec
        assert len(session.read(lease)) == lease.stream.size_bytes < lease.payload.size_bytes


def a_teacher(teacher_id: str) -> Any:
    return FIRST.message("TeacherProfile")(
        teacher_id=teacher_id,
        batch_grid=grid(rig.ROWS),
        vocabulary_size=rig.VOCABULARY,
        head_rows=rig.VOCABULARY,
        top_k=rig.TOP_K,
        max_row_tokens=64,
        value_type=FLOAT16,
        columns=[FIRST.value("ColumnKind", f"COLUMN_KIND_{each}") for each in rig_columns()],
    )


def rig_columns() -> list[str]:
    return [column.kind.name for column in rig.a_payload().columns]


def reservation(teacher_id: str) -> tuple[dict[str, Any], bytes]:
    """A reservation of step 0, and the payload's bytes."""
    described = rig.a_payload()
    payload = FIRST.message("Payload").FromString(payload_to_wire(described).SerializeToString())
    payload.key.teacher_id = payload.teacher_id = teacher_id
    positions = rig.positions_of(described)
    request = {"request_id": request_id(), "payload": payload, "row_positions": positions}
    return request, rig.bytes_of(described)


def publish_over_line(publisher: Session, request: dict[str, Any], data: bytes) -> None:
    """Pass a slab, reserve, announce, write and seal."""
    line, own = publisher.line, {"session_id": publisher.session_id}
    assert line is not None
    descriptor, slab = make_slab(SLAB_BYTES)
    line.call([descriptor], put_slab={"slab_id": "first", "size_bytes": 65536 + SLAB_BYTES})
    os.close(descriptor)
    payload_id = line.call(reserve=own | request).reserve.payload_id
    room = {"offset_bytes": 0, "size_bytes": 4096 * -(-len(data) // 4096)}
    extent = {"slab_id": "first", "slot": 3, "generation": 2, **room}
    named = own | {"payload_id": payload_id, "extent": extent}
    slab.write(data)
    assert line.call(announce=named).WhichOneof("body") == "announce"
    slab.mark(3, 2)
    line.call(seal=named)


def publish_by_stream(publisher: Session, request: dict[str, Any], data: bytes) -> None:
    """Reserve, stream and seal."""
    payload_id = publisher.call("RegistryService/ReservePayload", **request).payload_id
    named = {"session_id": publisher.session_id, "payload_id": payload_id}
    chunks: list[dict[str, object]] = []
    for offset in range(0, len(data), 1000):
        part = data[offset : offset + 1000]
        chunk = {"offset_bytes": offset, "crc32c": crc32c.crc32c(part), "data": part}
        chunks.append(chunk if offset else {**named, **chunk})
    assert publisher.client.upload("RegistryService/WritePayload", chunks).offset_bytes == len(data)
    publisher.call("RegistryService/SealPayload", payload_id=payload_id)


@BOTH_WAYS
def test_it_publishes_a_step_and_reads_it(client: FirstClient, shares: bool) -> None:
    name = f"first-{shares}"
    request, data = reservation(name)
    with client.publisher(a_teacher(name), shares=shares) as publisher:
        (publish_over_line if shares else publish_by_stream)(publisher, request, data)
        wanted = {"teacher_id": name, "top_k": rig.TOP_K}
        with client.student(shares=shares, **wanted) as session:
            if session.line is not None:
                own = {"session_id": session.session_id}
                session.line.call(want_steps=own | {"first_step": 0, "count": 1})
                grant = session.line.mail().step
            else:
                asked = {"request_id": request_id(), "step": 0}
                grant = session.call("TeacherLogitsService/AcquireStep", **asked).grant
            (lease,) = grant.leases
            assert (grant.step, grant.real_rows) == (0, rig.ROWS)
            assert session.read(lease) == data
            session.call("TeacherLogitsService/ReleasePayload", lease_id=lease.lease_id)
        if publisher.line is not None:
            assert list(publisher.line.mail().freed.payload_ids) == [lease.payload.payload_id]


def test_it_sees_what_the_server_holds(client: FirstClient) -> None:
    with client.student(shares=False, teacher_id="teacher") as session:
        lease = score(session)
        seen = client.call("OperatorService/Inspect")
        assert session.session_id in [each.session_id for each in seen.sessions]
        assert lease.lease_id in [each.lease_id for each in seen.leases]
