"""Slabs of device memory over broker lines: handles pass untouched, and the server opens none."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from tests.server.services.registry_rig import (
    PATIENCE,
    LineEnd,
    Publisher,
    Student,
    Wire,
    a_payload,
    a_student,
    a_teacher,
    bytes_of,
    holders_of,
    positions_of,
    refused,
    serving,
)

from teacher_logits import keys
from teacher_logits.clock import MonotonicClock
from teacher_logits.cuts import cut_rows
from teacher_logits.device_memory import DeviceMemoryPart, DeviceProbe, ExportedMemory
from teacher_logits.errors import (
    HostCopyNeededError,
    NotAllowedError,
    PayloadInvalidError,
    RequestInvalidError,
)
from teacher_logits.layout import is_on_device
from teacher_logits.payload import Extent
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.slab import WriterSlab
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import Transport, proof_of
from teacher_logits.v1 import device_pb2, line_pb2, registry_service_pb2
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits.wire import student_to_wire, teacher_to_wire, transport_to_wire
from teacher_logits.wire.transport import (
    part_from_wire,
    part_to_wire,
    probe_from_wire,
    probe_to_wire,
    settlement_from_wire,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.payload import Payload

CHALLENGE = bytes(range(32))
ROOM = 1024 * 1024
SPACE = 64 * 1024
"""From one column of a payload to the next: each is in pages of its own."""
OWN_HOLDERS = 2
"""Descriptors of a slab that its writer has: its own, and its map's."""
MEMORY = ExportedMemory(
    handle=os.urandom(64),
    device_uuid="GPU-00000000-aaaa-4000-8000-000000000000",
    base_offset_bytes=512,
    allocation_bytes=2 * ROOM,
)
PART = DeviceMemoryPart(memory=MEMORY, size_bytes=ROOM)
PROBE = DeviceProbe(writer_id="", memory=MEMORY, pid_namespace=4026531836, host="node")
WANTED = (Transport.CUDA_IPC, Transport.SHARED_MEMORY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("devices")) as wire:
        yield wire.address


@pytest.fixture
def wire(server: str) -> Iterator[Wire]:
    with Wire(server) as wire:
        yield wire


def own_line(
    wire: Wire, session_id: str, nonce: bytes, path: str
) -> tuple[LineEnd, messages.LocalityProof]:
    """Open a session's line; return it, and the proof that it shares memory."""
    line = LineEnd(path)
    wire.lines.append(line)
    hello = line_pb2.HelloRequest(session_id=session_id, nonce=nonce)
    size = line.call(hello=hello).hello.challenge_size_bytes
    challenge = os.pread(line.descriptors[-1], size, 0)
    return line, proof(Transport.SHARED_MEMORY, SERVER_WRITER, challenge, nonce)


def proof(
    transport: Transport, writer_id: str, challenge: bytes, nonce: bytes
) -> messages.LocalityProof:
    return messages.LocalityProof(
        writer_id=writer_id,
        transport=transport_to_wire(transport),
        mac=proof_of(challenge, nonce=nonce, transport=transport),
    )


def open_publisher(
    wire: Wire, *, challenge: bytes = CHALLENGE, probe: DeviceProbe = PROBE
) -> registry_service_pb2.OpenPublisherResponse:
    request = registry_service_pb2.OpenPublisherRequest(
        request_id=keys.new_id("r", "test"),
        protocol_version=PROTOCOL_VERSION,
        profile=teacher_to_wire(a_teacher(teacher_id=keys.new_id("t", "test"))),
        probe=probe_to_wire(probe),
        probe_challenge=challenge,
    )
    return refused(lambda: wire.registry.OpenPublisher(request, timeout=PATIENCE))


@dataclass(kw_only=True)
class DevicePublisher(Publisher):
    """A publisher with a probe, of a teacher of its own."""

    teacher_id: str


def a_publisher(wire: Wire) -> DevicePublisher:
    """A publisher with a probe, that has settled."""
    opened = open_publisher(wire)
    session_id = opened.session.session_id
    line, shared = own_line(wire, session_id, opened.nonce, opened.broker_path)
    request = messages.ProveLocalityRequest(session_id=session_id, proofs=[shared])
    wire.students.ProveLocality(request, timeout=PATIENCE)
    teacher_id = opened.session.teacher.teacher_id
    return DevicePublisher(wire=wire, session_id=session_id, line=line, teacher_id=teacher_id)


def a_reader(wire: Wire, publisher: DevicePublisher, *, sees: bool = True) -> Student:
    """A student that wants device memory, and has read the publisher's probe or not."""
    profile = a_student(teacher_id=publisher.teacher_id, transports=WANTED)
    opened = wire.students.OpenSession(
        messages.OpenSessionRequest(
            request_id=keys.new_id("r", "test"),
            protocol_version=PROTOCOL_VERSION,
            profile=student_to_wire(profile),
        ),
        timeout=PATIENCE,
    )
    session_id = opened.session.session_id
    line, shared = own_line(wire, session_id, opened.nonce, opened.broker_path)
    (probe,) = map(probe_from_wire, opened.device_probes)
    assert probe == replace(PROBE, writer_id=probe.writer_id)
    proofs = [shared]
    if sees:
        proofs.append(proof(Transport.CUDA_IPC, probe.writer_id, CHALLENGE, opened.nonce))
    request = messages.ProveLocalityRequest(session_id=session_id, proofs=proofs)
    (settled,) = wire.students.ProveLocality(request, timeout=PATIENCE).session.transports
    wanted = Transport.CUDA_IPC if sees else Transport.SHARED_MEMORY
    assert settlement_from_wire(settled).transport is wanted
    return Student(wire=wire, session_id=session_id, line=line)


def put(
    publisher: Publisher, *, is_sparse: bool = True, device: DeviceMemoryPart | None = PART
) -> WriterSlab:
    """Make a host twin and pass it, with the device memory whose twin it is."""
    twin = WriterSlab(keys.new_id("slab", "test"), ROOM, is_sparse=is_sparse)
    publisher.wire.slabs.append(twin)
    publisher.slab = twin
    request = line_pb2.PutSlabRequest(
        slab_id=twin.slab_id,
        size_bytes=twin.total_bytes,
        device=None if device is None else part_to_wire(device),
    )
    publisher.own_line.call([twin.fd], put_slab=request)
    return twin


def a_step(publisher: DevicePublisher) -> tuple[Payload, bytes]:
    payload = a_payload(positions=2000)
    assert payload.key is not None
    columns = [replace(c, offset_bytes=n * SPACE) for n, c in enumerate(payload.columns)]
    payload = replace(
        payload,
        columns=tuple(columns),
        size_bytes=len(columns) * SPACE,
        teacher_id=publisher.teacher_id,
        key=replace(payload.key, teacher_id=publisher.teacher_id),
    )
    return payload, bytes_of(payload)


def place(
    twin: WriterSlab, payload: Payload, data: bytes, *, on_host: bool, leave_out: str = ""
) -> Extent:
    """Write the columns over rows into the twin, and the others too where they are copied."""
    size = -(-len(data) // 4096) * 4096
    extent = Extent(slab_id=twin.slab_id, offset_bytes=0, size_bytes=size, slot=0, generation=2)
    room = twin.room(extent)
    for column in payload.columns:
        if column.kind.value != leave_out and (on_host or not is_on_device(column.kind)):
            span = slice(column.offset_bytes, column.end_bytes)
            room[span] = data[span]
    twin.mark(extent.slot, extent.generation)
    return extent


def assert_is_not_kept(publisher: Publisher) -> None:
    """Wait until the server has closed what a publisher has passed last."""
    assert publisher.slab is not None
    limit = MonotonicClock().now() + PATIENCE
    while holders_of(publisher.slab.fd) > OWN_HOLDERS:  # it is closed on the broker's thread
        assert MonotonicClock().now() < limit


def memory_of(twin: WriterSlab) -> int:
    return os.fstat(twin.fd).st_blocks * 512


class TestAReaderOnTheDevice:
    def test_is_passed_the_handle_untouched_beside_the_twin(self, wire: Wire) -> None:
        publisher = a_publisher(wire)
        twin = put(publisher)
        reader = a_reader(wire, publisher)
        reply = reader.own_line.call(get_slab=line_pb2.GetSlabRequest(slab_id=twin.slab_id))

        assert part_from_wire(reply.get_slab.device, slab_id=twin.slab_id) == PART
        assert reply.get_slab.size_bytes == twin.total_bytes
        assert os.path.sameopenfile(reader.own_line.descriptors[-1], twin.fd)

    def test_is_granted_what_has_no_host_copy_and_nothing_of_it_becomes_memory(
        self, wire: Wire
    ) -> None:
        publisher = a_publisher(wire)
        twin = put(publisher)
        reader = a_reader(wire, publisher)
        payload, data = a_step(publisher)
        reserved = publisher.reserve(payload)
        assert not reserved.host_copy
        extent = place(twin, payload, data, on_host=False)
        before = memory_of(twin)
        publisher.seal(reserved.payload_id, extent)
        (lease,) = reader.acquire(0).leases

        assert lease.on_device
        assert lease.extent == extent
        assert memory_of(twin) == before < payload.size_bytes

    def test_is_shown_to_who_inspects(self, wire: Wire) -> None:
        publisher = a_publisher(wire)
        twin = put(publisher)
        reader = a_reader(wire, publisher)
        shown = wire.inspect()

        (slab,) = [s for s in shown.registered.device_slabs if s.slab_id == twin.slab_id]
        assert (slab.device_uuid, slab.size_bytes) == (MEMORY.device_uuid, ROOM)
        (session,) = [s for s in shown.sessions if s.session_id == reader.session_id]
        assert settlement_from_wire(session.transports[0]).transport is Transport.CUDA_IPC


class TestAReaderOfHostCopies:
    def test_is_passed_the_twin_alone(self, wire: Wire) -> None:
        publisher = a_publisher(wire)
        twin = put(publisher)
        reader = a_reader(wire, publisher, sees=False)
        reply = reader.own_line.call(get_slab=line_pb2.GetSlabRequest(slab_id=twin.slab_id))

        assert not reply.get_slab.HasField("device")
        assert os.path.sameopenfile(reader.own_line.descriptors[-1], twin.fd)

    def test_has_them_made_by_a_refused_seal(self, wire: Wire) -> None:
        publisher = a_publisher(wire)
        twin = put(publisher)
        reader = a_reader(wire, publisher, sees=False)
        payload, data = a_step(publisher)
        reserved = publisher.reserve(payload)
        assert reserved.host_copy
        extent = place(twin, payload, data, on_host=False)
        with pytest.raises(HostCopyNeededError, match="copy its columns to the host twin"):
            publisher.seal(reserved.payload_id, extent)
        place(twin, payload, data, on_host=True)
        publisher.seal(reserved.payload_id, extent, host_copy=True)
        (lease,) = reader.acquire(0).leases

        assert not lease.on_device
        read = reader.read(lease)
        for column in payload.columns:
            span = slice(column.offset_bytes, column.end_bytes)
            assert read[span] == data[span], column.kind

    def test_elsewhere_is_streamed_them_and_no_hole_is_filled(self, wire: Wire) -> None:
        publisher = a_publisher(wire)
        twin = put(publisher)
        reader = wire.student(a_student(teacher_id=publisher.teacher_id), streams=True)
        payload, data = a_step(publisher)
        payload_id = publisher.reserve(payload).payload_id
        extent = place(twin, payload, data, on_host=True)
        publisher.seal(payload_id, extent, host_copy=True)
        before = memory_of(twin)
        (lease,) = reader.acquire(0).leases
        read = reader.read(lease)

        assert memory_of(twin) == before
        cut = cut_rows(payload, positions_of(payload), first_row=0, row_count=payload.row_count)
        assert lease.payload.columns == cut.payload.columns
        for segment in cut.segments:
            here = slice(segment.offset_bytes, segment.offset_bytes + segment.size_bytes)
            there = slice(
                segment.source_offset_bytes, segment.source_offset_bytes + segment.size_bytes
            )
            assert read[here] == data[there]


class TestASealOfWhatIsNotThere:
    @pytest.mark.parametrize(
        ("on_host", "leave_out"),
        [(False, "row_digests"), (False, "row_offsets"), (True, "topk_ids"), (True, "log_tail")],
    )
    def test_is_refused_by_the_columns_name(
        self, wire: Wire, *, on_host: bool, leave_out: str
    ) -> None:
        publisher = a_publisher(wire)
        twin = put(publisher)
        a_reader(wire, publisher)
        payload, data = a_step(publisher)
        payload_id = publisher.reserve(payload).payload_id
        extent = place(twin, payload, data, on_host=on_host, leave_out=leave_out)
        with pytest.raises(PayloadInvalidError) as refusal:
            publisher.seal(payload_id, extent, host_copy=on_host)

        assert refusal.value.facts["column"] == leave_out
        assert refusal.value.facts["has"] == 0


class TestADescriptor:
    def test_that_is_sparse_comes_with_device_memory(self, wire: Wire) -> None:
        publisher = a_publisher(wire)
        with pytest.raises(RequestInvalidError, match="in memory; allocate all of it"):
            put(publisher, device=None)

    def test_may_be_whole_all_the_same(self, wire: Wire) -> None:
        put(a_publisher(wire), is_sparse=False)

    @pytest.mark.parametrize(
        ("device", "words"),
        [
            (replace(PART, memory=replace(MEMORY, handle=bytes(63))), "handle of 63 bytes"),
            (replace(PART, size_bytes=2 * ROOM), "of an allocation of"),
            (replace(PART, memory=replace(MEMORY, device_uuid="0")), "no UUID"),
            (
                replace(
                    PART,
                    memory=replace(MEMORY, allocation_bytes=4 * ROOM),
                    size_bytes=ROOM + 4096,
                ),
                f"has room for {ROOM} bytes, and its device memory {ROOM + 4096}",
            ),
        ],
        ids=["handle", "range", "uuid", "room"],
    )
    def test_with_device_memory_that_cannot_be_is_refused_and_not_kept(
        self, wire: Wire, device: DeviceMemoryPart, words: str
    ) -> None:
        publisher = a_publisher(wire)
        with pytest.raises(RequestInvalidError) as refusal:
            put(publisher, device=device)

        assert words in refusal.value.message
        assert_is_not_kept(publisher)

    def test_is_for_publishers_with_a_probe(self, wire: Wire) -> None:
        publisher = wire.publisher(a_teacher(teacher_id=keys.new_id("t", "test")))
        with pytest.raises(NotAllowedError, match="opened with a probe"):
            put(publisher)
        assert_is_not_kept(publisher)


class TestAProbe:
    def test_needs_its_challenge(self, wire: Wire) -> None:
        with pytest.raises(RequestInvalidError, match="has 5 bytes; give 32 random ones"):
            open_publisher(wire, challenge=b"short")

    def test_that_cannot_be_is_refused(self, wire: Wire) -> None:
        probe = replace(PROBE, memory=replace(MEMORY, handle=b""))
        with pytest.raises(RequestInvalidError, match="the probe of the publisher has a handle of"):
            open_publisher(wire, probe=probe)


def test_proofs_of_device_memory_are_bounded(wire: Wire) -> None:
    publisher = a_publisher(wire)
    proofs = [messages.LocalityProof(transport=transport_to_wire(Transport.CUDA_IPC))] * 1025
    request = messages.ProveLocalityRequest(session_id=publisher.session_id, proofs=proofs)
    with pytest.raises(RequestInvalidError, match="proofs has 1025 entries; give at most 1024"):
        refused(lambda: wire.students.ProveLocality(request, timeout=PATIENCE))


def test_a_message_of_device_memory_keeps_every_field() -> None:
    filled = part_to_wire(PART)

    assert {field.name for field, _ in filled.ListFields()} == {
        field.name for field in device_pb2.DeviceMemory.DESCRIPTOR.fields
    }
