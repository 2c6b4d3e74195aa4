"""What is sent ahead over lines, as packets that a line can carry."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits.errors import NotAvailable
from teacher_logits.terms import RoomFreed, SlabsGone, StepFailure, WritersCame
from teacher_logits.wire.steps import mail_to_wire
from teacher_logits_server.broker.lines import MAX_PACKET_BYTES

if TYPE_CHECKING:
    from teacher_logits.terms import Mail, StepGrant
    from teacher_logits_server.services.lease_messages import LeaseMessages

MAX_FREED = 1000
"""Payload ids of one packet."""
MAX_GONE = 250
"""Slab ids of one packet: publishers choose them, and they may be long."""
MAX_CAME = 100
"""Probes of one packet: each has a handle, a UUID, and a host's name of the publisher's choice."""


def mail_packets(mail: Mail, messages: LeaseMessages) -> list[bytes]:
    """Return the packets of one piece of mail; that of a grant alone may be too large."""
    if isinstance(mail, RoomFreed) and len(mail.payload_ids) > MAX_FREED:
        first = replace(mail, payload_ids=mail.payload_ids[:MAX_FREED])
        rest = replace(mail, payload_ids=mail.payload_ids[MAX_FREED:])
        return [*mail_packets(first, messages), *mail_packets(rest, messages)]
    if isinstance(mail, SlabsGone) and len(mail.slab_ids) > MAX_GONE:
        some = [SlabsGone(slab_ids=mail.slab_ids[:MAX_GONE])]
        some.append(SlabsGone(slab_ids=mail.slab_ids[MAX_GONE:]))
        return [packet for each in some for packet in mail_packets(each, messages)]
    if isinstance(mail, WritersCame) and len(mail.probes) > MAX_CAME:
        parts = [WritersCame(probes=mail.probes[:MAX_CAME])]
        parts.append(WritersCame(probes=mail.probes[MAX_CAME:]))
        return [packet for each in parts for packet in mail_packets(each, messages)]
    return [mail_to_wire(mail, lease_message=messages.lease).SerializeToString()]


def failure_of(grant: StepGrant, size_bytes: int) -> StepFailure:
    """Return what is sent instead of a grant of so many bytes, which no packet carries."""
    error = NotAvailable(
        f"what step {grant.step} grants takes {size_bytes} bytes, for {len(grant.leases)} shards, "
        f"and a line carries {MAX_PACKET_BYTES}: give the teacher fewer data-parallel ranks a "
        "student rank",
        facts={"step": grant.step, "leases": len(grant.leases), "size_bytes": size_bytes},
    )
    return StepFailure(step=grant.step, error=error)
