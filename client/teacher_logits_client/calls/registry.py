"""The registry's calls: what publishers ask over gRPC, and how their bytes travel.

Chunks are framed by hand, one copy each, as protobuf would write a ``WritePayloadRequest``:

    the first only  | 0a varint length | session id | 12 varint length | payload id |
    each            | 18 varint offset | 25 crc32c, 4 bytes | 7a varint length | data ... |
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import crc32c
import grpc

from teacher_logits.protocol import OURS
from teacher_logits.v1 import registry_service_pb2, registry_service_pb2_grpc
from teacher_logits.wire import sending, teacher_to_wire
from teacher_logits.wire.protocol import spoken_to_wire
from teacher_logits.wire.session import session_from_wire
from teacher_logits.wire.steps import reservation_from_wire
from teacher_logits.wire.transport import probe_to_wire
from teacher_logits_client.calls.failures import Waiting, stream_error_of
from teacher_logits_client.calls.opened import OpenedSession
from teacher_logits_client.calls.told import Telling
from teacher_logits_client.line.write_requests import reserve_request, seal_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from teacher_logits.addresses import Address
    from teacher_logits.device_memory import DeviceProbe
    from teacher_logits.payload import Extent, Payload
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.terms import Reservation
    from teacher_logits_client.calls.channels import Channels
    from teacher_logits_client.calls.invoking import Invoker

_OPEN_PUBLISHER = "/teacher_logits.v1.RegistryService/OpenPublisher"
_OPENING = "the opening of a publisher"
_WRITE_PAYLOAD = "/teacher_logits.v1.RegistryService/WritePayload"
_SESSION_TAG, _PAYLOAD_TAG = b"\x0a", b"\x12"
_OFFSET_TAG, _CRC_TAG, _DATA_TAG = b"\x18", b"\x25", b"\x7a"
_CRC = struct.Struct("<I")


class RegistryCalls:
    """What a publisher calls over gRPC; ``Calls`` makes one."""

    def __init__(self, channels: Channels, *, address: Address, invoke: Invoker) -> None:
        self._channels = channels
        self._address = address
        self._invoke = invoke
        self._service = registry_service_pb2_grpc.RegistryServiceStub(channels.control)
        self._open_publisher: Telling[
            registry_service_pb2.OpenPublisherRequest, registry_service_pb2.OpenPublisherResponse
        ] = Telling(
            channels.control,
            _OPEN_PUBLISHER,
            reply=registry_service_pb2.OpenPublisherResponse,
            what=_OPENING,
        )
        self._write = channels.bulk.stream_unary(
            _WRITE_PAYLOAD,
            request_serializer=bytes,
            response_deserializer=registry_service_pb2.WritePayloadResponse.FromString,
        )

    def open_publisher(
        self,
        profile: TeacherProfile,
        *,
        request_id: str,
        timeout: float,
        probe: DeviceProbe | None = None,
        challenge: bytes = b"",
    ) -> OpenedSession:
        """Be admitted, or raise every broken rule.

        ``probe`` is of a publisher that writes to device memory, and ``challenge`` what lies there.
        """
        with sending("teacher profile"):
            message = teacher_to_wire(profile)
        reply = self._invoke(
            self._open_publisher,
            registry_service_pb2.OpenPublisherRequest(
                request_id=request_id,
                **spoken_to_wire(OURS),
                profile=message,
                probe=None if probe is None else probe_to_wire(probe),
                probe_challenge=challenge,
            ),
            what=_OPENING,
            timeout=timeout,
        )
        return OpenedSession(
            terms=session_from_wire(reply.session),
            broker_path=reply.broker_path,
            nonce=reply.nonce,
        )

    def reserve(
        self,
        session_id: str,
        *,
        request_id: str,
        payload: Payload,
        row_positions: Sequence[int],
        real_rows: int,
        timeout: float,
    ) -> Reservation:
        """Claim the rows of a payload; a publisher that streams waits for room."""
        step = payload.key.step if payload.key is not None else -1
        reply = self._invoke(
            self._service.ReservePayload,
            reserve_request(
                session_id,
                request_id=request_id,
                payload=payload,
                row_positions=row_positions,
                real_rows=real_rows,
            ),
            what=f"room for {payload.row_count} rows of step {step}",
            timeout=timeout,
        )
        return reservation_from_wire(reply)

    def write(
        self, session_id: str, payload_id: str, chunks: Iterable[bytes], *, timeout: float
    ) -> int:
        """Send chunks (see ``chunk``); return the first byte that has not come.

        Without chunks it only asks for that.

        Raises:
            SessionExpiredError: this client was closed, before or meanwhile.
            StreamBrokenError: the connection broke; what came counts.
        """
        try:
            named = _named(session_id, payload_id, chunks)
            shown = self._channels.shown.metadata(session_id)
            reply = self._write(named, timeout=timeout, metadata=shown)
        except (grpc.RpcError, ValueError) as error:
            waiting = Waiting(
                what=f"the upload of payload {payload_id}", address=self._address, seconds=timeout
            )
            raise stream_error_of(
                error, waiting, session_id=session_id, is_closed=self._channels.is_closed
            ) from None
        return reply.offset_bytes

    def seal(
        self,
        session_id: str,
        payload_id: str,
        *,
        extent: Extent | None,
        bad_row_count: int,
        valid_count: int | None,
        digest: str,
        timeout: float,
        host_copy: bool = False,
    ) -> None:
        """Make a payload readable and immutable."""
        self._invoke(
            self._service.SealPayload,
            seal_request(
                session_id,
                payload_id,
                extent=extent,
                bad_row_count=bad_row_count,
                valid_count=valid_count,
                digest=digest,
                host_copy=host_copy,
            ),
            what=f"the seal of payload {payload_id}",
            timeout=timeout,
        )

    def abandon(self, session_id: str, payload_id: str, *, timeout: float) -> bool:
        """Give a reservation up; True where it was sealed before, and is held."""
        reply = self._invoke(
            self._service.AbandonPayload,
            registry_service_pb2.AbandonPayloadRequest(
                session_id=session_id, payload_id=payload_id
            ),
            what=f"the giving up of payload {payload_id}",
            timeout=timeout,
        )
        return reply.is_sealed


def chunk(data: memoryview, offset_bytes: int) -> bytes:
    """Frame some bytes of a payload, with their checksum."""
    parts = [_OFFSET_TAG, _varint(offset_bytes), _CRC_TAG, _CRC.pack(crc32c.crc32c(data))]
    return b"".join([*parts, _DATA_TAG, _varint(len(data)), data])


def _named(session_id: str, payload_id: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Say in the first chunk whose they are; without any, in a message of its own."""
    session, payload = session_id.encode(), payload_id.encode()
    names = b"".join(
        [_SESSION_TAG, _varint(len(session)), session, _PAYLOAD_TAG, _varint(len(payload)), payload]
    )
    for each in chunks:
        yield names + each
        names = b""
    if names:
        yield names


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
