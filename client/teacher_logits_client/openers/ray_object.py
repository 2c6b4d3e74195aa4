"""Opener for ``ray_object``: a payload as one flat object of a Ray cluster's store.

    server   PutObject(lease) -> ticket               over gRPC: ids and a token
    holder   token -> reference                       over Ray
    store    reference -> the payload's bytes         of this node; Ray brings them from another

They are copied into a buffer of this side, which is used again, and the object is let go of. With
``MapMode.READ_ONLY`` they are read where they lie in the store: all views of one payload in one
process are at one address. The object's room is then taken until the last of them is gone, and
nothing keeps a tensor there from being written into, which every other reader would see.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from teacher_logits.clock import span_text
from teacher_logits.cuts import join_parts
from teacher_logits.errors import DeadlinePassedError, ObjectLostError, PayloadInvalidError
from teacher_logits.terms import StoredTicket
from teacher_logits.transport import Transport
from teacher_logits_client.openers.buffered_payload import BufferedPayload
from teacher_logits_client.openers.host_payload import HostPayload
from teacher_logits_client.openers.ray_cluster import copy, fetch_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.payload import Payload
    from teacher_logits.terms import LeaseTerms, ObjectTicket, PartTicket
    from teacher_logits_client.openers.buffers import BufferPool


ROOM_SECONDS = 1.0
"""How long a payload waits for room in the store, where it may be streamed instead."""
PUT_SECONDS = 10.0
"""How long a payload may take to be put, and at most half of the time there is, where it may be
streamed instead: whoever puts it may hang."""


class PutObject(Protocol):
    """Has a lease's payload put into the store, within ``timeout`` seconds.

    It waits for room there ``room_wait`` seconds at most.
    """

    def __call__(
        self, lease_id: str, *, timeout: float, room_wait: float
    ) -> ObjectTicket | StoredTicket:
        """Return what the holder is to be shown."""


class ObjectPayload(HostPayload):
    """A payload in the object store of this node."""

    copied = False

    def is_current(self) -> bool:
        """Say that it is: an object is never overwritten, and lasts while it is viewed."""
        return True

    def vacate(self) -> int:
        """Let go of the object."""
        self.buffer = memoryview(b"")
        return 0


class RayObjectOpener:
    """Opens leases of one session from the object store.

    Args:
        put: has a lease's payload put there.
        pool: the buffers that payloads are copied into.
        as_views: read them in the store instead.
        may_stream: whether payloads that find no room soon may come another way.
    """

    transport = Transport.RAY_OBJECT

    def __init__(
        self, put: PutObject, pool: BufferPool, *, as_views: bool, may_stream: bool
    ) -> None:
        self._put = put
        self._pool = pool
        self._as_views = as_views
        self._may_stream = may_stream

    def open(self, lease: LeaseTerms, *, until: float) -> ObjectPayload | BufferedPayload:
        """Return the lease's payload. See ``Opener.open``.

        Raises:
            ObjectLostError: the server has no cluster any more, or the holder or object is gone.
            ProducerLostError: it lay on a node that is gone, and nowhere else.
            PoolFullError: the store has no room for it, or this process no memory.
        """
        ticket = self._ask(lease.lease_id, until - time.monotonic())
        if isinstance(ticket, StoredTicket):
            try:
                found = self._fetch([each.ticket for each in ticket.parts], lease.lease_id, until)
                return self._opened(found, ticket.parts, lease.payload)
            except ObjectLostError:
                if self._may_stream:
                    raise
                # Asked again, the server brings what is left of it to its own node.
                ticket = self._ask(lease.lease_id, until - time.monotonic())
                if isinstance(ticket, StoredTicket):
                    raise
        [whole] = self._fetch([ticket], lease.lease_id, until)
        return self._whole(whole, lease.payload)

    def _fetch(
        self, tickets: Sequence[ObjectTicket], lease_id: str, until: float
    ) -> list[memoryview]:
        """Return the objects of a payload; where they do not come, leave time for the stream."""
        if not self._may_stream:
            return fetch_all(tickets, lease_id, until=until)
        soon = (until - time.monotonic()) / 2
        try:
            return fetch_all(tickets, lease_id, until=until - soon)
        except DeadlinePassedError as error:
            raise ObjectLostError(error.message, facts=error.facts) from error

    def _opened(
        self, found: Sequence[memoryview], parts: Sequence[PartTicket], payload: Payload
    ) -> ObjectPayload | BufferedPayload:
        """Return a payload whose rows lie in one object, or in several."""
        if len(parts) == 1:
            return self._whole(found[0], payload)
        buffer = self._pool.take(payload.size_bytes)
        pieces = [(p.rows, p.positions, data) for p, data in zip(parts, found, strict=True)]
        with memoryview(buffer)[: payload.size_bytes] as room:
            try:
                join_parts(payload, pieces, room, copy=copy)
            except PayloadInvalidError as error:
                raise ObjectLostError(error.message, facts=error.facts) from error
        return BufferedPayload(buffer, payload.size_bytes, self._pool)

    def _whole(self, found: memoryview, payload: Payload) -> ObjectPayload | BufferedPayload:
        """Return a payload that is one object."""
        size = payload.size_bytes
        if found.format != "B" or found.nbytes != size:
            raise ObjectLostError(
                f"an object of payload {payload.payload_id} has {found.nbytes} bytes, and should "
                f"have {size}",
                facts={"size_bytes": size, "object_bytes": found.nbytes},
            )
        if self._as_views:
            return ObjectPayload(found)
        buffer = self._pool.take(size)
        with memoryview(buffer)[:size] as room:
            copy(found, room)
        return BufferedPayload(buffer, size, self._pool)

    def _ask(self, lease_id: str, left: float) -> ObjectTicket | StoredTicket:
        """Have the payload put; where that does not come to an end, leave time for the stream."""
        if not self._may_stream:
            return self._put(lease_id, timeout=left, room_wait=left)
        soon = min(left / 2, PUT_SECONDS)
        try:
            return self._put(lease_id, timeout=soon, room_wait=min(soon, ROOM_SECONDS))
        except DeadlinePassedError as error:
            raise ObjectLostError(
                f"the payload was not put into the object store within {span_text(soon)}: the "
                "server's Ray process, or its cluster, hangs",
                facts={"waited_seconds": soon},
            ) from error

    def close(self) -> None:
        """Keep nothing, so let go of nothing; the buffers are the client's."""
