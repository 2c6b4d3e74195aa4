"""What the server grants: the terms of a session, and leases with the place of their bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from teacher_logits.payload import Extent, Payload
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.transport import Settlement

SERVER_WRITER = "server"
"""Writer id of the server's own engine."""


class Verdict(enum.Enum):
    """What became of one check. A failed check refuses the session instead."""

    PASSED = "passed"
    UNCHECKED = "unchecked"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of the handshake, by its stable name, with a sentence."""

    name: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True, kw_only=True)
class SessionTerms:
    """What the server granted a student rank.

    ``ttl`` is a span, since hosts' clocks differ; a session with a broker line has no TTL
    while the line lasts. ``settlements`` is empty until locality was proven.
    """

    session_id: str
    epoch: str
    ttl: timedelta
    renew_interval: timedelta
    default_wait: timedelta
    teacher: TeacherProfile
    checks: tuple[Check, ...]
    vocabulary_size: int
    max_request_tokens: int
    settlements: tuple[Settlement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LeaseTerms:
    """The right to read one payload, and where its bytes are.

    ``extent`` is set where the payload lies in a slab that the session can open, and None
    where the bytes are to be streamed.
    """

    lease_id: str
    payload: Payload
    writer_id: str
    extent: Extent | None
