"""Exchange: requests and their replies over one socket of packets, and what is sent ahead on it.

Any thread may call. Whoever waits first reads for all (``turns``), so that a call costs no change
of threads, and hands every packet to its owner:

    the reply to a call     the thread that waits for it
    the reply to a post     the poster is told of a refusal
    a reply to nobody       its descriptor is closed, its lease given back
    a packet without call   mail, handed on in the order in which it came

Every wait has a deadline. A forked child may neither read nor send: it has no part in this.
"""

from __future__ import annotations

import itertools
import select
import time
from typing import TYPE_CHECKING

from teacher_logits import tracing
from teacher_logits.errors import TeacherLogitsError
from teacher_logits_client.line import packets
from teacher_logits_client.line.replies import no_reply
from teacher_logits_client.line.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from teacher_logits.terms import Mail
    from teacher_logits.v1 import line_pb2
    from teacher_logits_client.line.replies import Reply

    OnMail = Callable[[Mail], None]
    OnRefusal = Callable[[TeacherLogitsError], None]


class Exchange(Turns):
    """One end of a socket of packets, connected to the broker at ``path``.

    Args:
        late_lease: told of a lease whose acquisition had been given up when it came.
        on_mail: given what comes ahead by the thread that reads; it must not wait here.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout: float,
        late_lease: Callable[[str], None] | None = None,
        on_mail: OnMail = lambda mail: None,
    ) -> None:
        """Connect.

        Raises:
            OSError: nobody answers at the path, or this platform has no such sockets.
        """
        super().__init__(path, timeout=timeout)
        self._late_lease = late_lease
        self._on_mail = on_mail
        self._call_ids = itertools.count(1)
        #: Replies by call, None while they are awaited; calls that were given up are not here.
        self._replies: dict[int, Reply | None] = {}
        #: Who is told of a refusal, by the post that was refused.
        self._posts: dict[int, OnRefusal] = {}

    def call(
        self,
        request: line_pb2.LineRequest,
        *,
        what: str,
        timeout: float,
        descriptors: Sequence[int] = (),
    ) -> Reply:
        """Send a request, with descriptors that stay the caller's, and wait for its reply.

        Raises:
            DeadlinePassedError: no reply came within ``timeout`` seconds.
            ServerUnreachableError: the connection has ended.
            ForkedClientError: this is a forked child.
            TeacherLogitsError: what the broker answered.
        """
        self._home.check("session")
        until = time.monotonic() + timeout
        call_id = request.call_id = next(self._call_ids)
        request.traceparent = tracing.traceparent()
        with self._lock:
            self._check_open()
            self._replies[call_id] = None
        reply: Reply | None = None
        try:
            self._send(request.SerializeToString(), until, descriptors)
            self._read_until(lambda: self._replies[call_id] is not None, until)
            with self._lock:
                reply = self._take_out(call_id)
        except BaseException:
            with self._lock:
                reply = self._take_out(call_id) or reply
            if reply is not None:  # it came in the very last moment
                self._dispose(reply)
            raise
        if reply is None:
            raise no_reply(what, path=self._path, seconds=timeout)
        failure = reply.failure
        if failure is not None:
            reply.close()
            raise failure
        return reply

    def post(
        self, request: line_pb2.LineRequest, *, until: float, on_refusal: OnRefusal
    ) -> int | None:
        """Send a request and do not wait for its reply; return its call id, None if dropped.

        A full socket is waited for until ``until`` (``time.monotonic`` seconds); if it is full
        then, the request is dropped. ``on_refusal`` is called as ``on_mail`` is.

        Raises:
            ServerUnreachableError, ForkedClientError: as for ``call``.
        """
        self._home.check("session")
        call_id = request.call_id = next(self._call_ids)
        request.traceparent = tracing.traceparent()
        with self._lock:
            self._check_open()
            self._posts[call_id] = on_refusal
        if not self._send(request.SerializeToString(), until):
            with self._lock:
                self._posts.pop(call_id, None)
            return None
        return call_id

    def has_answered(self, call_id: int) -> bool:
        """Say whether the reply to a post has come."""
        with self._lock:
            return call_id not in self._posts

    def _send(self, packet: bytes, until: float, descriptors: Sequence[int] = ()) -> bool:
        """Send a packet; False where the socket stays full until the deadline, or is gone."""
        while True:
            try:
                packets.send(self._socket, packet, descriptors)
                return True
            except BlockingIOError:
                if not packets.wait(self._socket, select.POLLOUT, until):
                    return False  # the wait for the reply is over at once, and says so
            except OSError as error:
                self._ended(f"the broker is gone ({error})")
                return False

    def _take_out(self, call_id: int) -> Reply | None:
        """Return a call's reply, whose owner is the caller from now on; lock held."""
        reply = self._replies.get(call_id)
        if reply is not None:
            self._inbox.note_delivered(reply)
        if call_id in self._replies:
            del self._replies[call_id]
        return reply

    def _deliver(self, reply: Reply) -> None:
        if reply.is_mail:
            self._deliver_mail(reply)
            return
        call_id = reply.message.call_id
        with self._lock:
            if call_id in self._replies:
                first, self._replies[call_id] = self._replies[call_id], reply
                if first is not None and first is not reply:  # of a broker that answers twice
                    first.close()
                return
            on_refusal = self._posts.get(call_id)
        self._dispose(reply)
        if on_refusal is not None:
            if reply.failure is not None:
                on_refusal(reply.failure)
            with self._lock:
                self._posts.pop(call_id, None)

    def _deliver_mail(self, reply: Reply) -> None:
        reply.close()
        try:
            mail = reply.mail
        except TeacherLogitsError as error:
            # What it grants can be neither read nor given back: that ends with the line.
            self._ended(f"what the broker sent ahead is no mail: {error.message}")
            return
        self._on_mail(mail)

    def _dispose(self, reply: Reply) -> None:
        """Deal with a reply that nobody waits for any more."""
        reply.close()
        if reply.lease_id and self._late_lease is not None:
            self._late_lease(reply.lease_id)
