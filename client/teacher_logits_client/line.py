"""The broker line: the client's end of a session's Unix socket to its server.

One packet is one message; descriptors ride beside it. Any thread may call: whoever waits
first reads for all, so that a call costs no change of threads. Every call has a deadline, and
a reply that comes after it is dealt with all the same: its descriptor is closed, its lease
given back.

The end of a line tells the server that nobody here reads any more. So whoever owns a line
closes it after the last view is gone, not before.
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from teacher_logits.errors import (
    DeadlinePassedError,
    ServerUnreachableError,
    SlabOpenError,
    TeacherLogitsError,
)
from teacher_logits.v1 import line_pb2, teacher_logits_service_pb2
from teacher_logits.wire_errors import from_status
from teacher_logits.wire_session import lease_from_wire
from teacher_logits_client import packets

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.terms import LeaseTerms

_MAX_CHALLENGE_BYTES = 1 << 16


@dataclass
class _Reply:
    message: line_pb2.LineReply
    descriptors: list[int]


class Line:
    """A line to the broker at ``path``.

    Args:
        late_lease: told of a lease whose acquisition had been given up when it came.
    """

    def __init__(
        self, path: str, *, timeout: float, late_lease: Callable[[str], None] | None = None
    ) -> None:
        """Connect.

        Raises:
            OSError: nobody answers at the path, or this platform has no such sockets.
        """
        self._path = path
        self._late_lease = late_lease
        self._socket = packets.connect(path, timeout)
        self._call_ids = itertools.count(1)
        self._changed = threading.Condition()
        #: Replies by call, None while they are awaited; calls that were given up are not here.
        self._replies: dict[int, _Reply | None] = {}
        self._somebody_reads = False
        self._end = ""
        self._closed = False

    @property
    def has_ended(self) -> bool:
        """Whether either side has closed the line."""
        with self._changed:
            if not self._end and packets.has_hung_up(self._socket):
                self._end = "the broker hung up"
            return bool(self._end)

    def hello(self, session_id: str, nonce: bytes, *, timeout: float) -> bytes:
        """Say which session this line is for; return the challenge that the server passed."""
        request = line_pb2.HelloRequest(session_id=session_id, nonce=nonce)
        reply = self._call(
            line_pb2.LineRequest(hello=request), what="the broker's challenge", timeout=timeout
        )
        fd = _one_descriptor(reply)
        try:
            size = reply.message.hello.challenge_size_bytes
            if not 0 < size <= _MAX_CHALLENGE_BYTES:
                raise SlabOpenError(f"the broker's challenge has {size} bytes")
            with mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as page:
                return page[:]
        except (OSError, ValueError) as error:
            raise SlabOpenError(f"the broker's challenge cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def get_slab(self, slab_id: str, timeout: float) -> int:
        """Return the descriptor of a slab; the caller closes it."""
        request = line_pb2.GetSlabRequest(slab_id=slab_id)
        reply = self._call(
            line_pb2.LineRequest(get_slab=request), what=f"slab {slab_id}", timeout=timeout
        )
        return _one_descriptor(reply)

    def acquire(
        self, session_id: str, *, request_id: str, payload_id: str, timeout: float
    ) -> LeaseTerms:
        """Lease a payload."""
        request = teacher_logits_service_pb2.AcquirePayloadRequest(
            session_id=session_id, request_id=request_id, payload_id=payload_id
        )
        reply = self._call(
            line_pb2.LineRequest(acquire=request), what=f"payload {payload_id}", timeout=timeout
        )
        _close_all(reply)
        return lease_from_wire(reply.message.acquire.lease)

    def release(
        self, session_id: str, lease_id: str, *, timeout: float, request_id: str = ""
    ) -> None:
        """Return a lease, or, with no lease id, whatever a request was or will be granted."""
        request = teacher_logits_service_pb2.ReleasePayloadRequest(
            session_id=session_id, lease_id=lease_id, request_id=request_id
        )
        _close_all(
            self._call(
                line_pb2.LineRequest(release=request), what="the return of a lease", timeout=timeout
            )
        )

    def close(self) -> None:
        """Let go of the line; twice is fine.

        Nothing is shut down: a forked child that has the line too keeps it open.
        """
        with self._changed:
            self._end = self._end or "this client closed it"
            self._changed.notify_all()
            self._closed = True
            if not self._somebody_reads:
                self._socket.close()

    def _call(self, request: line_pb2.LineRequest, *, what: str, timeout: float) -> _Reply:
        """Send a request and wait for its reply.

        Raises:
            DeadlinePassedError: no reply came within ``timeout`` seconds.
            ServerUnreachableError: the line has ended.
            TeacherLogitsError: what the broker answered.
        """
        until = time.monotonic() + timeout
        request.call_id = next(self._call_ids)
        with self._changed:
            self._check_open()
            self._replies[request.call_id] = None
        try:
            self._send(request.SerializeToString(), until)
            reply = self._wait(request.call_id, until)
        finally:
            with self._changed:
                given_up = self._replies.pop(request.call_id, None)
            if given_up is not None:  # it came in the very last moment
                self._dispose(given_up)
        if reply is None:
            raise DeadlinePassedError(
                f"waited {timeout:.3g} s for {what}, and the broker at {self._path} did not "
                "answer: the server is stopped, or gone",
                facts={"path": self._path, "deadline_seconds": timeout},
            )
        if reply.message.status:
            _close_all(reply)
            raise _error(reply.message.status)
        return reply

    def _send(self, packet: bytes, until: float) -> None:
        while True:
            try:
                packets.send(self._socket, packet)
                return
            except BlockingIOError:
                if not packets.wait(self._socket, select.POLLOUT, until):
                    return  # the wait for the reply is over at once, and says so
            except OSError as error:
                self._ended(f"the broker is gone ({error})")
                return

    def _wait(self, call_id: int, until: float) -> _Reply | None:
        """Return a call's reply, read by whichever thread waits first; None after the deadline."""
        while True:
            with self._changed:
                reply = self._replies[call_id]
                if reply is not None:
                    self._replies[call_id] = None
                    return reply
                self._check_open()
                left = until - time.monotonic()
                if left <= 0:
                    return None
                if self._somebody_reads:
                    self._changed.wait(left)
                    continue
                self._somebody_reads = True
            try:
                self._read(until)
            finally:
                with self._changed:
                    self._somebody_reads = False
                    self._changed.notify_all()
                    if self._closed:
                        self._socket.close()

    def _read(self, until: float) -> None:
        """Take one reply off the socket, whosever it is."""
        if not packets.wait(self._socket, select.POLLIN, until):
            return
        try:
            packet, descriptors, intact = packets.receive(self._socket)
        except BlockingIOError:
            return
        except OSError as error:
            self._ended(f"the broker is gone ({error})")
            return
        if not packet:
            self._ended("the broker hung up")
            return
        reply = _Reply(line_pb2.LineReply(), descriptors)
        try:
            reply.message.ParseFromString(packet)
        except DecodeError:
            intact = False
        if not intact:
            _close_all(reply)
            self._ended("the broker sent a packet that cannot be read")
            return
        with self._changed:
            awaited = reply.message.call_id in self._replies
            if awaited:
                self._replies[reply.message.call_id] = reply
        if not awaited:
            self._dispose(reply)

    def _dispose(self, reply: _Reply) -> None:
        """Deal with a reply that nobody waits for any more."""
        _close_all(reply)
        if reply.message.WhichOneof("body") == "acquire" and self._late_lease is not None:
            self._late_lease(reply.message.acquire.lease.lease_id)

    def _ended(self, why: str) -> None:
        with self._changed:
            self._end = self._end or why
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._end:
            raise ServerUnreachableError(
                f"the line to the broker at {self._path} has ended: {self._end}",
                facts={"path": self._path},
            )


def _one_descriptor(reply: _Reply) -> int:
    if len(reply.descriptors) != 1:
        count = len(reply.descriptors)
        _close_all(reply)
        raise SlabOpenError(f"the broker passed {count} descriptors where one was due")
    return reply.descriptors.pop()


def _close_all(reply: _Reply) -> None:
    while reply.descriptors:
        os.close(reply.descriptors.pop())


def _error(status: bytes) -> TeacherLogitsError:
    message = status_pb2.Status()
    try:
        message.ParseFromString(status)
    except DecodeError:
        message.message = "it cannot be read"
    return from_status(message) or TeacherLogitsError(f"the broker failed: {message.message}")
