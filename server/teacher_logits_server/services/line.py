"""The desk behind the broker: what the packets of a line mean.

Promises: a reply for every packet, whatever it holds, with the packet's call id where that
can be read and 0 where it cannot. A line begins with a hello; one that does not, or that
shows a wrong nonce, is hung up on. A slab's descriptor is passed whenever it is asked for: a reply
can come too late for who asked, and passing leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from teacher_logits.errors import NotAllowedError, RequestInvalidError, TeacherLogitsError
from teacher_logits.transport import Refusal, RefusalReason, Transport
from teacher_logits.v1 import line_pb2
from teacher_logits.wire_errors import to_status
from teacher_logits_server.broker import Answer, Line
from teacher_logits_server.exporters.shared_memory import SharedMemoryExporter, new_challenge
from teacher_logits_server.services.student import acquire, release, renew

if TYPE_CHECKING:
    from teacher_logits_server.ledger import Ledger

_log = logging.getLogger(__name__)


class LineDesk:
    """Answers the packets of broker lines; ``broker.Desk`` is its interface.

    Args:
        allowed_uids: users whose processes may map shared memory, besides root and our own.
    """

    def __init__(
        self, *, ledger: Ledger, exporter: SharedMemoryExporter, allowed_uids: tuple[int, ...]
    ) -> None:
        self._ledger = ledger
        self._exporter = exporter
        self._allowed_uids = frozenset({0, os.geteuid(), *allowed_uids})

    def answer(self, line: Line, packet: bytes) -> Answer:
        """Answer one packet."""
        call_id = 0
        try:
            request = _parse(packet)
            call_id = request.call_id
            if line.session_id:
                return self._answer_call(line, request)
            return self._answer_hello(line, request)
        except TeacherLogitsError as error:
            return _refusal(call_id, error, hang_up=not line.session_id)
        except Exception as error:
            _log.exception("line call failed", extra={"facts": {"session_id": line.session_id}})
            return _refusal(call_id, error, hang_up=not line.session_id)

    def refuse_oversized(self, line: Line, limit_bytes: int) -> Answer:
        """Answer a packet of more than ``limit_bytes``."""
        error = RequestInvalidError(
            f"a packet has more than the {limit_bytes} bytes that a line carries",
            facts={"limit_bytes": limit_bytes},
        )
        return _refusal(0, error, hang_up=not line.session_id)

    def line_ended(self, line: Line, *, process_alive: bool) -> None:
        """Tell the ledger that nobody is at the other end of a session's line."""
        _log.info(
            "line ended",
            extra={"facts": {"session_id": line.session_id, "process_alive": process_alive}},
        )
        try:
            self._ledger.line_ended(line.session_id, process_alive=process_alive)
        except Exception:
            _log.exception("line end failed", extra={"facts": {"session_id": line.session_id}})

    def _answer_hello(self, line: Line, request: line_pb2.LineRequest) -> Answer:
        if request.WhichOneof("body") != "hello":
            raise RequestInvalidError("the first packet of a line is a hello, and only that")
        session_id = request.hello.session_id
        self._ledger.check_hello(session_id, request.hello.nonce)
        self._check_peer(line, session_id)
        challenge, descriptor = new_challenge()
        try:
            self._ledger.line_opened(session_id, pid=line.peer.pid, challenge=challenge)
        except BaseException:
            os.close(descriptor)
            raise
        line.session_id = session_id
        reply = line_pb2.LineReply(call_id=request.call_id)
        reply.hello.challenge_size_bytes = len(challenge)
        return Answer(packet=reply.SerializeToString(), descriptor=descriptor)

    def _check_peer(self, line: Line, session_id: str) -> None:
        """Refuse a process that may not map memory, or whose end the kernel cannot tell us."""
        peer = line.peer
        if peer.uid not in self._allowed_uids:
            reason = RefusalReason.BROKER_REFUSED
            message = (
                f"the client runs as user {peer.uid}, and the server shares memory with users "
                f"{', '.join(map(str, sorted(self._allowed_uids)))}: start it with --allow-uid "
                f"{peer.uid}"
            )
        elif not peer.is_proven or not peer.is_alive():
            reason = RefusalReason.PEER_UNPROVEN
            message = (
                "the kernel does not tell the server which process the client is (it takes Linux "
                "6.5, or 5.15 within one PID namespace)"
            )
        else:
            return
        refusal = Refusal(transport=Transport.SHARED_MEMORY, reason=reason, message=message)
        self._ledger.line_unproven(session_id, refusal)
        raise NotAllowedError(message, facts={"uid": peer.uid, "reason": reason.value})

    def _answer_call(self, line: Line, request: line_pb2.LineRequest) -> Answer:
        reply = line_pb2.LineReply(call_id=request.call_id)
        kind = request.WhichOneof("body")
        if kind == "acquire":
            _check_own(line, request.acquire.session_id)
            reply.acquire.CopyFrom(acquire(self._ledger, request.acquire))
        elif kind == "release":
            _check_own(line, request.release.session_id)
            reply.release.CopyFrom(release(self._ledger, request.release))
        elif kind == "renew":
            _check_own(line, request.renew.session_id)
            reply.renew.CopyFrom(renew(self._ledger, request.renew))
        elif kind == "get_slab":
            return self._pass_slab(line, request, reply)
        else:
            raise RequestInvalidError(
                "a line says hello once, and then get_slab, acquire, release or renew",
                facts={"kind": kind or "none"},
            )
        return Answer(packet=reply.SerializeToString())

    def _pass_slab(
        self, line: Line, request: line_pb2.LineRequest, reply: line_pb2.LineReply
    ) -> Answer:
        slab_id = request.get_slab.slab_id
        passed = self._exporter.pass_slab(line.session_id, slab_id)
        reply.get_slab.slab_id = slab_id
        reply.get_slab.size_bytes = passed.size_bytes
        return Answer(packet=reply.SerializeToString(), descriptor=passed.descriptor)


def _parse(packet: bytes) -> line_pb2.LineRequest:
    try:
        return line_pb2.LineRequest.FromString(packet)
    except DecodeError:
        raise RequestInvalidError(
            f"a packet of {len(packet)} bytes is no request of a line",
            facts={"size_bytes": len(packet)},
        ) from None


def _check_own(line: Line, session_id: str) -> None:
    if session_id != line.session_id:
        raise NotAllowedError(
            f"this is the line of session {line.session_id}; it serves no other",
            facts={"session_id": line.session_id},
        )


def _refusal(call_id: int, error: Exception, *, hang_up: bool) -> Answer:
    reply = line_pb2.LineReply(call_id=call_id, status=to_status(error).SerializeToString())
    return Answer(packet=reply.SerializeToString(), hang_up=hang_up)
