"""What publishers ask for, as messages: one form for two ways in, a broker line and gRPC.

Announcements go over a line only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.v1 import line_pb2, registry_service_pb2
from teacher_logits.wire.payloads import extent_to_wire, payload_to_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.payload import Extent, Payload


def reserve_request(
    session_id: str,
    *,
    request_id: str,
    payload: Payload,
    row_positions: Sequence[int],
    real_rows: int,
) -> registry_service_pb2.ReservePayloadRequest:
    """Return the message that claims a payload's rows; it has no payload id yet."""
    return registry_service_pb2.ReservePayloadRequest(
        session_id=session_id,
        request_id=request_id,
        payload=payload_to_wire(payload),
        row_positions=row_positions,
        real_rows=real_rows,
    )


def announce_request(
    session_id: str, payload_id: str, extent: Extent, valid_count: int | None
) -> line_pb2.AnnouncePayloadRequest:
    """Return the message that says where a payload will lie; ``valid_count`` as its seal's."""
    return line_pb2.AnnouncePayloadRequest(
        session_id=session_id,
        payload_id=payload_id,
        extent=extent_to_wire(extent),
        valid_count=valid_count,
    )


def seal_request(
    session_id: str,
    payload_id: str,
    *,
    extent: Extent | None,
    bad_row_count: int,
    valid_count: int | None,
    digest: str,
    host_copy: bool = False,
) -> registry_service_pb2.SealPayloadRequest:
    """Return the message that seals a payload.

    ``extent`` where it lies in the publisher's own slab, ``valid_count`` the positions that
    count where a mask was given, ``digest`` the payload's, needed for a repeat only.
    ``host_copy``: the slab's host twin has the columns that lie in device memory too.
    """
    return registry_service_pb2.SealPayloadRequest(
        session_id=session_id,
        payload_id=payload_id,
        extent=None if extent is None else extent_to_wire(extent),
        bad_row_count=bad_row_count,
        valid_count=valid_count,
        digest=digest,
        host_copy=host_copy,
    )
