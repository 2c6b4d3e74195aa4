"""The broker line: the client's end of a session's Unix socket to its server, call by call.

A student's line leases and returns, and has steps sent ahead (``want_steps``, mail); a
publisher's hands slabs over, reserves and seals, and is told of freed room (mail). How a
packet finds its owner is ``exchange``'s.

The end of a line tells the server that nobody here reads any more. So whoever owns a line
closes it after the last view is gone, not before.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from teacher_logits.errors import SlabOpenError, TeacherLogitsError
from teacher_logits.session_page import ReaderPage
from teacher_logits.v1 import line_pb2, registry_service_pb2, teacher_logits_service_pb2
from teacher_logits.wire.payloads import lease_from_wire
from teacher_logits.wire.steps import reservation_from_wire
from teacher_logits.wire.transport import part_from_wire, part_to_wire
from teacher_logits_client.line import packets, write_requests
from teacher_logits_client.line.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits.payload import Extent, Payload
    from teacher_logits.terms import LeaseTerms, Reservation
    from teacher_logits_client.line.exchange import OnRefusal
    from teacher_logits_client.line.replies import Reply

SAY_WHY_SECONDS = 0.25
"""How long an error that is due waits for the server's own words."""

MAX_RESERVED_ROWS = 10_000
"""Rows of a reservation that surely fits into a packet; a larger one goes over gRPC."""


class PassedSlab(NamedTuple):
    """A slab that came over a line. Whoever holds it closes the descriptor.

    ``device`` is its part in device memory, where the session was settled to read it there; the
    descriptor is then that of its host twin.
    """

    descriptor: int
    size_bytes: int
    device: DeviceMemoryPart | None


class Line(Exchange):
    """A line to the broker at ``path``; see ``Exchange`` for what it is made with.

    Every call raises DeadlinePassedError where no reply comes in time, ServerUnreachableError
    where the line has ended, and what the broker refused it for.
    """

    _page: ReaderPage | None = None
    secret = ""  # what the session's gRPC calls show from the hello on; an older server has none

    def hello(self, session_id: str, nonce: bytes, *, timeout: float) -> bytes:
        """Say which session this line is for; return the challenge that the server passed."""
        request = line_pb2.HelloRequest(session_id=session_id, nonce=nonce, shows_secret=True)
        reply = self.call(
            line_pb2.LineRequest(hello=request), what="the broker's challenge", timeout=timeout
        )
        self.secret = reply.message.hello.secret
        fd = _one_descriptor(reply)
        try:
            self._page = ReaderPage(fd, reply.message.hello.challenge_size_bytes)
        finally:
            os.close(fd)
        return self._page.challenge

    def is_revoked(self, lease_id: str) -> bool:
        """Say whether an operator took a lease back by force; asks nobody."""
        return self._page is not None and self._page.is_revoked(lease_id)

    def await_packet(self, bell: int) -> None:
        """Wait until the server has sent something, or a bell rings; take neither.

        ``bell`` is an eventfd of the caller's. Whoever reads or calls meanwhile is not hindered.
        """
        packets.wait_beside(self._socket, bell)

    # What students call

    def get_slab(self, slab_id: str, timeout: float) -> PassedSlab:
        """Return a slab; the caller closes its descriptor."""
        request = line_pb2.GetSlabRequest(slab_id=slab_id)
        reply = self.call(
            line_pb2.LineRequest(get_slab=request), what=f"slab {slab_id}", timeout=timeout
        )
        passed = reply.message.get_slab
        fd = _one_descriptor(reply)
        try:
            has_device = passed.HasField("device")
            device = part_from_wire(passed.device, slab_id=slab_id) if has_device else None
        except BaseException:
            os.close(fd)
            raise
        return PassedSlab(descriptor=fd, size_bytes=passed.size_bytes, device=device)

    def acquire(
        self, session_id: str, *, request_id: str, payload_id: str, timeout: float
    ) -> LeaseTerms:
        """Lease a payload."""
        request = teacher_logits_service_pb2.AcquirePayloadRequest(
            session_id=session_id, request_id=request_id, payload_id=payload_id
        )
        reply = self._plain(
            line_pb2.LineRequest(acquire=request), what=f"payload {payload_id}", timeout=timeout
        )
        return lease_from_wire(reply.acquire.lease)

    def want_steps(
        self, session_id: str, first_step: int, count: int, *, until: float, on_refusal: OnRefusal
    ) -> int | None:
        """Ask for steps, which come as mail; returns at once.

        ``first_step`` is asked for now, and ``count`` steps from there on are sent as they
        become ready. The rest as for ``Exchange.post``.
        """
        request = line_pb2.WantStepsRequest(
            session_id=session_id, first_step=first_step, count=count
        )
        whole = line_pb2.LineRequest(want_steps=request)
        return self.post(whole, until=until, on_refusal=on_refusal)

    def waits_for(self, session_id: str, step: int = 0) -> str:
        """Return what a step lacks, in the server's words; of a publisher, whom its room waits for.

        Empty where the server does not answer at once.
        """
        request = line_pb2.WantStepsRequest(session_id=session_id, first_step=step)
        try:
            reply = self._plain(
                line_pb2.LineRequest(want_steps=request),
                what=f"step {step}",
                timeout=SAY_WHY_SECONDS,
            )
        except TeacherLogitsError:  # what is told instead is an error too
            return ""
        return reply.want_steps.lacking

    def release(
        self,
        session_id: str,
        lease_id: str,
        *,
        timeout: float,
        request_id: str = "",
        unread: bool = False,
    ) -> None:
        """Return a lease, or, with no lease id, whatever a request was or will be granted.

        ``unread``: nobody has read it, and its step still waits for this reader.
        """
        request = teacher_logits_service_pb2.ReleasePayloadRequest(
            session_id=session_id, lease_id=lease_id, request_id=request_id, unread=unread
        )
        self._plain(
            line_pb2.LineRequest(release=request), what="the return of a lease", timeout=timeout
        )

    def watch(self, fd: int) -> Callable[[], None]:
        """Have whoever waits here look again when a slab's file is touched; see ``packets``."""
        return self._socket.watch(fd)

    # What publishers call

    def put_slab(
        self,
        slab_id: str,
        size_bytes: int,
        fd: int,
        *,
        timeout: float,
        device: DeviceMemoryPart | None = None,
    ) -> None:
        """Hand a slab of our own over; ``fd`` stays the caller's, the server has its own.

        ``device`` is what of it lies in device memory; ``fd`` is then that of its host twin.
        """
        request = line_pb2.PutSlabRequest(
            slab_id=slab_id,
            size_bytes=size_bytes,
            device=None if device is None else part_to_wire(device),
        )
        self.call(
            line_pb2.LineRequest(put_slab=request),
            what=f"the handing over of slab {slab_id}",
            timeout=timeout,
            descriptors=(fd,),
        ).close()

    def drop_slab(self, slab_id: str, *, timeout: float) -> None:
        """Say that nothing will be written to a slab any more."""
        request = line_pb2.DropSlabRequest(slab_id=slab_id)
        self._plain(
            line_pb2.LineRequest(drop_slab=request),
            what=f"the end of slab {slab_id}",
            timeout=timeout,
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
        """Claim the rows of a payload, at most ``MAX_RESERVED_ROWS`` of them."""
        request = write_requests.reserve_request(
            session_id,
            request_id=request_id,
            payload=payload,
            row_positions=row_positions,
            real_rows=real_rows,
        )
        reply = self._plain(
            line_pb2.LineRequest(reserve=request), what=_rows_text(payload), timeout=timeout
        )
        return reservation_from_wire(reply.reserve)

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
        """Make a payload readable and immutable; see ``seal_request``."""
        request = write_requests.seal_request(
            session_id,
            payload_id,
            extent=extent,
            bad_row_count=bad_row_count,
            valid_count=valid_count,
            digest=digest,
            host_copy=host_copy,
        )
        self._plain(
            line_pb2.LineRequest(seal=request),
            what=f"the seal of payload {payload_id}",
            timeout=timeout,
        )

    def announce(
        self, session_id: str, payload_id: str, extent: Extent, valid_count: int | None
    ) -> None:
        """Say where a payload will lie that is reserved; waits for nothing, not even room."""
        request = write_requests.announce_request(session_id, payload_id, extent, valid_count)
        whole = line_pb2.LineRequest(announce=request)
        self.post(whole, until=0.0, on_refusal=lambda error: None)  # its seal is told as well

    def abandon(self, session_id: str, payload_id: str, *, timeout: float) -> bool:
        """Give a reservation up; True where it was sealed before, and is held."""
        request = registry_service_pb2.AbandonPayloadRequest(
            session_id=session_id, payload_id=payload_id
        )
        reply = self._plain(
            line_pb2.LineRequest(abandon=request),
            what=f"the giving up of payload {payload_id}",
            timeout=timeout,
        )
        return reply.abandon.is_sealed

    def _plain(
        self, request: line_pb2.LineRequest, *, what: str, timeout: float
    ) -> line_pb2.LineReply:
        """Call for a reply that has no descriptors."""
        reply = self.call(request, what=what, timeout=timeout)
        reply.close()
        return reply.message


def _rows_text(payload: Payload) -> str:
    step = "" if payload.key is None else f" of step {payload.key.step}"
    last = payload.first_row + payload.row_count - 1
    return f"the claim on rows {payload.first_row} to {last}{step}"


def _one_descriptor(reply: Reply) -> int:
    if len(reply.descriptors) != 1:
        count = len(reply.descriptors)
        reply.close()
        why = "" if count else ": this process may have no more open (ulimit -n)"
        raise SlabOpenError(f"the broker passed {count} descriptors where one was due{why}")
    return reply.descriptors.pop()
