"""Replies: packets of a broker line as messages, with the descriptors that came beside them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from teacher_logits.clock import span_text
from teacher_logits.errors import DeadlinePassedError, TeacherLogitsError
from teacher_logits.v1 import line_pb2
from teacher_logits.wire.errors import from_status
from teacher_logits.wire.steps import mail_from_wire

if TYPE_CHECKING:
    from teacher_logits.terms import Mail
    from teacher_logits_client.line.packets import Packet


@dataclass(frozen=True)
class Reply:
    """A packet from the broker. Whoever has it closes the descriptors, or takes them out."""

    message: line_pb2.LineReply
    descriptors: list[int]

    @property
    def is_mail(self) -> bool:
        """Whether it answers no request."""
        return self.message.call_id == 0

    @property
    def failure(self) -> TeacherLogitsError | None:
        """What the broker refused the request for."""
        status = self.message.status
        if not status:
            return None
        said = status_pb2.Status()
        try:
            said.ParseFromString(status)
        except DecodeError:
            said.message = "it cannot be read"
        return from_status(said) or TeacherLogitsError(f"the broker failed: {said.message}")

    @property
    def lease_id(self) -> str:
        """The lease that it brings, empty where it brings none."""
        is_lease = self.message.WhichOneof("body") == "acquire"
        return self.message.acquire.lease.lease_id if is_lease else ""

    @cached_property
    def mail(self) -> Mail:
        """What was sent ahead, the same each time.

        Raises:
            TeacherLogitsError: why it is none.
        """
        if self.failure is not None:
            raise self.failure  # a request that the broker could not even read
        return mail_from_wire(self.message)

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        close_all(self.descriptors)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors, each once."""
    while descriptors:
        os.close(descriptors.pop())


def read_reply(packet: Packet) -> Reply | None:
    """Return what a packet says; None where it says nothing that can be read.

    Then its descriptors stay the caller's: an empty packet, which is no end yet, may bring some.
    """
    reply = Reply(line_pb2.LineReply(), packet.descriptors)
    try:
        reply.message.ParseFromString(packet.data)
        is_read = bool(packet.data) and packet.intact
    except DecodeError:
        is_read = False
    return reply if is_read else None


def no_reply(what: str, *, path: str, seconds: float) -> DeadlinePassedError:
    """Return the error of a call that was not answered."""
    return DeadlinePassedError(
        f"waited {span_text(seconds)} for {what}, and the broker at {path} did not answer: the "
        "server is stopped, or gone",
        facts={"path": path, "deadline_seconds": seconds},
    )
