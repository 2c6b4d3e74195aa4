"""Golden bytes of all that crosses for device memory (T16): torch's own formats are none of it.

What one side wrote, whatever its torch, the other reads: the driver's 64 bytes, a UUID and numbers.
That two releases of torch do so on a device is a stage of ``make gpu-check``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from teacher_logits.device_memory import DeviceMemoryPart, DeviceProbe, ExportedMemory
from teacher_logits.transport import Transport, proof_of
from teacher_logits.v1 import device_pb2, line_pb2
from teacher_logits.wire.transport import (
    part_from_wire,
    part_to_wire,
    probe_from_wire,
    probe_to_wire,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message

HANDLE = bytes(range(64))
MEMORY = ExportedMemory(
    handle=HANDLE, device_uuid="GPU-1", base_offset_bytes=512, allocation_bytes=1 << 32
)
PART = DeviceMemoryPart(memory=MEMORY, size_bytes=4096)
PROBE = DeviceProbe(writer_id="w", memory=MEMORY, pid_namespace=4026531836, host="node")

#: Field 1, 64 bytes; field 2, "GPU-1"; field 3, 512; field 4, 2^32.
PLACE = b"\x0a\x40" + HANDLE + b"\x12\x05GPU-1" + b"\x18\x80\x04" + b"\x20\x80\x80\x80\x80\x10"
PART_BYTES = PLACE + b"\x28\x80\x20"
PROBE_BYTES = (
    b"\x0a\x01w" + b"\x12\x54" + PLACE + b"\x28\x20" + b"\x18\xfc\xff\xff\xff\x0e" + b"\x22\x04node"
)
#: Call 7, then field 4 or 8: slab "s" of 8192 bytes, and its part.
SLAB_BYTES = b"\x0a\x01s" + b"\x10\x80\x40" + b"\x1a\x55" + PART_BYTES
PASSED_BYTES = b"\x08\x07" + b"\x22\x5d" + SLAB_BYTES
PUT_BYTES = b"\x08\x07" + b"\x42\x5d" + SLAB_BYTES

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from teacher_logits.v1 import device_pb2
from teacher_logits.wire.transport import part_from_wire, probe_from_wire
part, probe = map(bytes.fromhex, sys.argv[1:])
part_from_wire(device_pb2.DeviceMemory.FromString(part), slab_id="s")
probe_from_wire(device_pb2.DeviceProbe.FromString(probe))
"""


def written(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def test_a_part_in_device_memory() -> None:
    assert written(part_to_wire(PART)) == PART_BYTES
    assert part_from_wire(device_pb2.DeviceMemory.FromString(PART_BYTES), slab_id="s") == PART


def test_a_probe() -> None:
    assert written(probe_to_wire(PROBE)) == PROBE_BYTES
    assert probe_from_wire(device_pb2.DeviceProbe.FromString(PROBE_BYTES)) == PROBE


def test_a_slab_that_is_passed_to_a_reader() -> None:
    slab = line_pb2.GetSlabResponse(slab_id="s", size_bytes=8192, device=part_to_wire(PART))
    assert written(line_pb2.LineReply(call_id=7, get_slab=slab)) == PASSED_BYTES


def test_a_slab_that_a_publisher_hands_over() -> None:
    slab = line_pb2.PutSlabRequest(slab_id="s", size_bytes=8192, device=part_to_wire(PART))
    assert written(line_pb2.LineRequest(call_id=7, put_slab=slab)) == PUT_BYTES


def test_a_proof_of_what_was_read_there() -> None:
    mac = proof_of(bytes(range(32)), nonce=bytes(16), transport=Transport.CUDA_IPC)
    assert mac.hex() == "e04b7f56be4be9f7c65009deb19ec9ca579a78fcbc10322a4a06de299600a342"


def test_it_is_read_where_torch_cannot_even_be_imported() -> None:
    told = (PART_BYTES.hex(), PROBE_BYTES.hex())
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *told], check=True)
