"""Device memory, refusals and settlements cross the wire whole, and what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_logits.device_memory import (
    HANDLE_BYTES,
    MAX_ALLOCATION_BYTES,
    DeviceMemoryPart,
    DeviceProbe,
    ExportedMemory,
)
from teacher_logits.devices.ranges import check_claimed
from teacher_logits.errors import RequestInvalidError
from teacher_logits.layout import ALIGNMENT_BYTES
from teacher_logits.transport import Refusal, RefusalReason, Settlement, Transport
from teacher_logits.v1 import device_pb2, transport_pb2
from teacher_logits.wire.transport import (
    part_from_wire,
    part_to_wire,
    probe_from_wire,
    probe_to_wire,
    refusal_from_wire,
    refusal_to_wire,
    settlement_from_wire,
    settlement_to_wire,
)

UUID = "GPU-00000000-aaaa-4000-8000-000000000000"
MEMORY = ExportedMemory(
    handle=bytes(range(HANDLE_BYTES)),
    device_uuid=UUID,
    base_offset_bytes=512,
    allocation_bytes=1 << 20,
)
PART = DeviceMemoryPart(memory=MEMORY, size_bytes=4096)

memories = st.builds(
    lambda handle, uuid, pages, size: ExportedMemory(
        handle=handle,
        device_uuid=uuid,
        base_offset_bytes=256 * pages,
        allocation_bytes=256 * pages + size + 4096,
    ),
    st.binary(min_size=HANDLE_BYTES, max_size=HANDLE_BYTES),
    st.sampled_from([UUID, "MIG-22222222-cccc-4000-8000-000000000002", "MIG-GPU-7d/1/2"]),
    st.integers(0, 1 << 30),
    st.integers(1, 1 << 40),
)
probes = st.builds(
    DeviceProbe,
    writer_id=st.sampled_from(["", "publisher-0-1a"]),
    memory=memories,
    pid_namespace=st.integers(0, 2**64 - 1),
    host=st.text(max_size=20),
)
refusals = st.builds(
    Refusal,
    transport=st.sampled_from(Transport),
    reason=st.sampled_from(RefusalReason),
    message=st.text(max_size=30),
    writer_id=st.sampled_from(["", "publisher-0-1a"]),
)


@given(memory=memories, probe=probes)
def test_device_memory_crosses_as_it_is(memory: ExportedMemory, probe: DeviceProbe) -> None:
    part = DeviceMemoryPart(memory=memory, size_bytes=memory.allocation_bytes % 4096 + 1)
    data = part_to_wire(part).SerializeToString()

    assert part_from_wire(device_pb2.DeviceMemory.FromString(data), slab_id="s") == part
    assert probe_from_wire(probe_to_wire(probe)) == probe


@given(
    settlement=st.builds(
        Settlement,
        writer_id=st.just("publisher-0-1a"),
        transport=st.none() | st.sampled_from(Transport),
        refusals=st.lists(refusals, max_size=3).map(tuple),
        probe=st.none() | probes,
    )
)
def test_a_settlement_crosses_with_its_refusals_and_its_probe(settlement: Settlement) -> None:
    data = settlement_to_wire(settlement).SerializeToString()

    assert settlement_from_wire(transport_pb2.SettledTransport.FromString(data)) == settlement


def test_a_refusal_says_whose_memory_it_is_about() -> None:
    refusal = Refusal(
        transport=Transport.CUDA_IPC,
        reason=RefusalReason.OTHER_DEVICE,
        message="not here",
        writer_id="publisher-3",
    )

    assert refusal_from_wire(refusal_to_wire(refusal)).writer_id == "publisher-3"


def broken(**changes: object) -> DeviceMemoryPart:
    size_bytes = changes.pop("size_bytes", PART.size_bytes)
    memory = replace(MEMORY, **changes)  # type: ignore[arg-type]
    return DeviceMemoryPart(memory=memory, size_bytes=size_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (broken(handle=b""), "handle of 0 bytes; the driver's have 64"),
        (broken(handle=bytes(65)), "handle of 65 bytes"),
        (broken(device_uuid="0"), "device '0', which is no UUID"),
        (broken(device_uuid="GPU-" + "x" * 200), "which is no UUID"),
        (broken(device_uuid=f"{UUID}\n"), "which is no UUID"),
        (broken(base_offset_bytes=-256), "4096 bytes at -256"),
        (broken(base_offset_bytes=8), "from a multiple of 256 on"),
        (broken(size_bytes=0), "has 0 bytes at 512"),
        (broken(size_bytes=-1), "has -1 bytes at 512"),
        (broken(size_bytes=(1 << 20) - 511), "of an allocation of 1048576"),
        (broken(base_offset_bytes=(1 << 63) - 256, size_bytes=(1 << 63) - 1), "at most"),
        (broken(allocation_bytes=MAX_ALLOCATION_BYTES + 1), "at most"),
    ],
)
def test_device_memory_that_cannot_be_is_refused(part: DeviceMemoryPart, words: str) -> None:
    with pytest.raises(RequestInvalidError) as refused:
        part_from_wire(part_to_wire(part), slab_id="mine")

    assert words in refused.value.message
    assert refused.value.message.startswith("the device memory of slab 'mine' ")


@given(
    start=st.integers(-1, 2**64) | st.integers(0, 40).map(lambda count: count * ALIGNMENT_BYTES),
    size=st.integers(-1, 2**64) | st.integers(-1, 4096),
    whole=st.integers(-1, 2**64) | st.integers(-1, 2 * MAX_ALLOCATION_BYTES),
    handle_bytes=st.sampled_from([0, 63, 64, 65]),
)
def test_what_a_peer_says_is_taken_where_it_lies_in_its_allocation(
    start: int, size: int, whole: int, handle_bytes: int
) -> None:
    said = replace(
        MEMORY,
        base_offset_bytes=start,
        allocation_bytes=whole,
        handle=bytes(handle_bytes),
    )
    is_aligned = start >= 0 and not start % ALIGNMENT_BYTES
    is_fine = handle_bytes == 64 and is_aligned and 0 < size <= whole - start and whole <= 2**46
    try:
        check_claimed(said, what="it", size_bytes=size)
    except RequestInvalidError:
        assert not is_fine
    else:
        assert is_fine


def test_a_probe_needs_room_for_its_challenge() -> None:
    probe = DeviceProbe(writer_id="", memory=replace(MEMORY, allocation_bytes=512 + 31))

    with pytest.raises(RequestInvalidError, match="the probe of the publisher has 32 bytes at 512"):
        probe_from_wire(probe_to_wire(probe))
