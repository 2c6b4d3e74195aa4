"""Leases as messages, for readers that wait: a registered payload's own part is made once.

It is made when the payload is reserved, which is before anybody waits for it, and serves every
reader of the whole payload.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits.wire.payloads import lease_to_wire, payload_to_wire

if TYPE_CHECKING:
    from teacher_logits.payload import Payload
    from teacher_logits.terms import LeaseTerms
    from teacher_logits.v1 import payload_pb2

MAX_KEPT = 1024
"""Payloads whose message is kept; one that is not is made anew for each lease."""


class LeaseMessages:
    """The messages of payloads that were reserved last; the broker's thread and the loop ask."""

    def __init__(self) -> None:
        self._payloads: dict[str, payload_pb2.Payload] = {}
        # One thread at a time may make room for a message.
        self._lock = threading.Lock()

    def make(self, payload_id: str, payload: Payload) -> None:
        """Make the message of a payload that is to come."""
        if payload_id in self._payloads or payload.key is None:
            return
        stamped = replace(payload, payload_id=payload_id, teacher_id=payload.key.teacher_id)
        message = payload_to_wire(stamped)
        with self._lock:
            self._payloads[payload_id] = message
            if len(self._payloads) > MAX_KEPT:
                del self._payloads[next(iter(self._payloads))]

    def lease(self, lease: LeaseTerms) -> payload_pb2.Lease:
        """Return the message of a lease."""
        payload = lease.payload
        message = self._payloads.get(payload.payload_id)
        if message is None or lease.extent is None:  # it is streamed, maybe as a cut of it
            return lease_to_wire(lease)
        if message.bad_row_count != payload.bad_row_count:  # known since the seal
            message.bad_row_count = payload.bad_row_count
        return lease_to_wire(lease, payload=message)
