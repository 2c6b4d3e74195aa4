"""The desk behind the broker: what the packets of a line mean.

Promises: a reply for every packet, whatever it holds, with the packet's call id where that
can be read; where it cannot, with call id 0 and a status, which no mail has. A line begins with a
hello (``hello``); one that is refused is hung up on. A slab's descriptor is passed
whenever it is asked for: a reply can come too late for who asked, and passing leaves nothing
behind.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from teacher_logits import tracing
from teacher_logits.errors import (
    NotAllowedError,
    RequestInvalidError,
    TeacherLogitsError,
)
from teacher_logits.terms import StepGrant
from teacher_logits.v1 import line_pb2
from teacher_logits.wire.errors import to_status
from teacher_logits.wire.transport import part_to_wire
from teacher_logits_server.broker.lines import MAX_PACKET_BYTES, Answer, Flaw, Line
from teacher_logits_server.metrics.refusals import Refusals, Surface
from teacher_logits_server.services.hello import HelloDesk
from teacher_logits_server.services.mail_packets import failure_of, mail_packets
from teacher_logits_server.services.session_log import PUBLISHER
from teacher_logits_server.services.student import acquire, release, renew

if TYPE_CHECKING:
    from collections.abc import Collection

    from teacher_logits_server.exporters import SlabExporter
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.services.publishing import PublisherCalls

_log = logging.getLogger(__name__)


class LineDesk:
    """Answers the packets of broker lines; ``broker.Desk`` is its interface.

    Args:
        allowed_uids, max_user_lines: as for ``HelloDesk``.
        refusals: counts every packet that is answered with an error, here alone.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        exporter: SlabExporter,
        publishing: PublisherCalls,
        allowed_uids: tuple[int, ...],
        max_user_lines: int,
        refusals: Refusals | None = None,
    ) -> None:
        self._ledger = ledger
        self._refusals = refusals or Refusals()
        self._publishing = publishing
        self._exporter = exporter
        #: Requests so far, by kind. Counted on the broker's thread alone, and read on any.
        self.calls: Counter[str] = Counter()
        #: Sessions that the server has ended, whose lines are to be shut.
        self._over: set[str] = set()
        self._hello = HelloDesk(
            ledger=ledger, allowed_uids=allowed_uids, max_user_lines=max_user_lines
        )

    def answer(self, line: Line, packet: bytes, descriptor: int | None = None) -> Answer:
        """Answer one packet; a descriptor stays the caller's."""
        call_id = 0
        try:
            request = _parse(packet)
            call_id = request.call_id
            if request.traceparent:
                return self._answer_traced(line, request, descriptor)
            if line.session_id:
                return self._answer_call(line, request, descriptor)
            self.calls["hello"] += 1
            return self._hello.answer(line, request)
        except TeacherLogitsError as error:
            return self._refusal(line, call_id, error)
        except Exception as error:
            facts = {"session_id": line.session_id}
            _log.exception("line call failed", extra={"facts": facts, "throttle": ""})
            return self._refusal(line, call_id, error)

    def _answer_traced(
        self, line: Line, request: line_pb2.LineRequest, descriptor: int | None
    ) -> Answer:
        """Answer a request under the span that its client sent along."""
        carried = request.traceparent[: tracing.MAX_TRACEPARENT_BYTES]
        request.ClearField("traceparent")
        name = f"line/{request.WhichOneof('body') or 'none'}"
        with tracing.serving(name, ((tracing.TRACEPARENT, carried),)):
            if line.session_id:
                return self._answer_call(line, request, descriptor)
            self.calls["hello"] += 1
            return self._hello.answer(line, request)

    def refuse(self, line: Line, packet: bytes, flaw: Flaw) -> Answer:
        """Answer a packet that is too large, or brought descriptors that it must not bring."""
        call_id = 0
        if flaw is Flaw.OVERSIZED:
            error = RequestInvalidError(
                f"a packet has more than the {MAX_PACKET_BYTES} bytes that a line carries",
                facts={"limit_bytes": MAX_PACKET_BYTES},
            )
        else:
            error = RequestInvalidError(
                "a packet brings one descriptor at most, on a publisher's line and with put_slab "
                "(where that was so, the server has no descriptors left)"
            )
            with suppress(RequestInvalidError):
                call_id = _parse(packet).call_id
        return self._refusal(line, call_id, error)

    def end(self, session_ids: Collection[str]) -> None:
        """Have the lines of these shut when their mail is looked at; from any thread."""
        self._over.update(session_ids)

    def mail(self, line: Line) -> list[bytes]:
        """Return what is due to be sent ahead."""
        line.is_over = line.session_id in self._over
        packets: list[bytes] = []
        messages = self._publishing.lease_messages
        for mail in self._ledger.take_mail(line.session_id):
            sent = mail_packets(mail, messages)
            if isinstance(mail, StepGrant) and len(sent[0]) > MAX_PACKET_BYTES:
                for lease in mail.leases:
                    self._ledger.release(line.session_id, lease.lease_id, unread=True)
                    self._ledger.give_up_announced(line.session_id, lease.lease_id)
                if mail.awaited:
                    continue  # what is granted once it is sealed may be smaller
                sent = mail_packets(failure_of(mail, len(sent[0])), messages)
            packets += sent
        return packets

    def line_ended(self, line: Line, *, process_alive: bool) -> bool:
        """Tell the ledger that nobody is at the other end of a session's line."""
        facts = {"session_id": line.session_id, "process_alive": process_alive}
        self._hello.ended(line)
        self._over.discard(line.session_id)
        try:
            self._publishing.hear_seals(line.session_id)
            who = self._ledger.describe(line.session_id)
            if who.get("kind") == PUBLISHER and self._is_living(line.session_id):
                _log.warning("publisher lost", extra={"facts": {**facts, **who}})
            else:
                _log.info("line ended", extra={"facts": {**facts, **who}})
            in_doubt = self._ledger.line_ended(
                line.session_id, process_alive=process_alive, is_cut=line.is_cut
            )
        except Exception:
            _log.exception("line end failed", extra={"facts": facts})
            return False
        if in_doubt:
            _log.warning("room in quarantine", extra={"facts": line.facts})
        return in_doubt

    def process_died(self, line: Line) -> None:
        """Tell the ledger that a child holds the line of a process that is gone."""
        try:
            self._publishing.hear_seals(line.session_id)
            if self._ledger.process_died(line.session_id):
                _log.warning("process died: a child holds its line", extra={"facts": line.facts})
        except Exception:
            _log.exception("process end failed", extra={"facts": line.facts})

    def process_ended(self, line: Line) -> None:
        """Tell the ledger that the process is gone too whose line ended while it lived."""
        try:
            self._ledger.process_ended(line.session_id)
            _log.info("quarantine cleared: process ended", extra={"facts": line.facts})
        except Exception:
            _log.exception("process end failed", extra={"facts": line.facts})

    def _refusal(self, line: Line, call_id: int, error: Exception) -> Answer:
        """Answer a packet with an error; who has not said hello yet is hung up on."""
        self._refusals.refused(Surface.LINE, error)
        reply = line_pb2.LineReply(call_id=call_id, status=to_status(error).SerializeToString())
        return Answer(reply.SerializeToString(), hang_up=not line.session_id)

    def _is_living(self, session_id: str) -> bool:
        """Whether a session has neither ended nor been closed."""
        try:
            self._ledger.terms(session_id)
        except TeacherLogitsError:
            return False
        return True

    def _answer_call(
        self, line: Line, request: line_pb2.LineRequest, descriptor: int | None
    ) -> Answer:
        kind = request.WhichOneof("body")
        self.calls[kind or "none"] += 1
        if kind == "get_slab":
            return self._pass_slab(line, request)
        reply = line_pb2.LineReply(call_id=request.call_id)
        if kind == "put_slab":
            self._publishing.put_slab(line.session_id, request.put_slab, descriptor)
            reply.put_slab.SetInParent()
        elif kind == "drop_slab":
            self._publishing.drop_slab(line.session_id, request.drop_slab)
            reply.drop_slab.SetInParent()
        elif kind == "reserve":
            _check_own(line, request.reserve.session_id)
            reply.reserve.CopyFrom(self._publishing.reserve(request.reserve))
        elif kind == "seal":
            _check_own(line, request.seal.session_id)
            self._publishing.seal(request.seal, may_digest=False)
            reply.seal.SetInParent()
        elif kind == "announce":
            _check_own(line, request.announce.session_id)
            self._publishing.announce(line.session_id, request.announce)
            reply.announce.SetInParent()
        elif kind == "abandon":
            _check_own(line, request.abandon.session_id)
            reply.abandon.CopyFrom(self._publishing.abandon(request.abandon))
        else:
            self._answer_reader(line, request, reply)
        return Answer(reply.SerializeToString())

    def _answer_reader(
        self, line: Line, request: line_pb2.LineRequest, reply: line_pb2.LineReply
    ) -> None:
        """Answer what students ask for, and renewals, which are everybody's."""
        kind = request.WhichOneof("body")
        if kind == "want_steps":
            wanted = request.want_steps
            _check_own(line, wanted.session_id)
            reply.want_steps.SetInParent()
            if wanted.count:
                self._ledger.want_steps(wanted.session_id, wanted.first_step, wanted.count)
            else:
                reply.want_steps.lacking = (
                    self._ledger.held_by(wanted.session_id)
                    if line.takes_descriptors  # a publisher's
                    else self._ledger.lacking(wanted.session_id, wanted.first_step)
                )
        elif kind == "acquire":
            _check_own(line, request.acquire.session_id)
            reply.acquire.CopyFrom(acquire(self._ledger, request.acquire))
        elif kind == "release":
            _check_own(line, request.release.session_id)
            self._publishing.hear_return(request.release)
            reply.release.CopyFrom(release(self._ledger, request.release))
        elif kind == "renew":
            _check_own(line, request.renew.session_id)
            reply.renew.CopyFrom(renew(self._ledger, request.renew))
        else:
            raise RequestInvalidError(
                "a line says hello once, and then get_slab, acquire, release, renew or want_steps; "
                "a publisher's put_slab, drop_slab, reserve, announce, seal, abandon or renew",
                facts={"kind": kind or "none"},
            )

    def _pass_slab(self, line: Line, request: line_pb2.LineRequest) -> Answer:
        slab_id = request.get_slab.slab_id
        passed = self._exporter.pass_slab(line.session_id, slab_id)
        reply = line_pb2.LineReply(call_id=request.call_id)
        reply.get_slab.slab_id = slab_id
        reply.get_slab.size_bytes = passed.size_bytes
        if passed.device is not None:
            reply.get_slab.device.CopyFrom(part_to_wire(passed.device))
        return Answer(reply.SerializeToString(), passed.descriptor)


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
