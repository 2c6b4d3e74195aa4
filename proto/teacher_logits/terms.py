"""What the server grants: the terms of a session, leases with the place of their bytes, steps.

Steps are sent ahead to a local session over its broker line, which hears there too of slabs that
it may let go and of writers whose device memory it may try, and a publisher of its freed room:
``Mail`` is all that can come so.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from teacher_logits.encodings import AS_WRITTEN, StreamCodec
from teacher_logits.error_bounds import EXACT, ErrorBound

if TYPE_CHECKING:
    from datetime import timedelta

    from teacher_logits.device_memory import DeviceProbe
    from teacher_logits.encodings import Encoding
    from teacher_logits.errors import TeacherLogitsError
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
class StreamTerms:
    """What a session's streams are encoded in where a payload allows it, and what that may cost."""

    codec: StreamCodec = AS_WRITTEN
    bound: ErrorBound = EXACT


@dataclass(frozen=True, kw_only=True)
class SessionTerms:
    """What the server granted a student rank.

    ``ttl`` is a span, since hosts' clocks differ; a session with a broker line has no TTL
    while the line lasts. ``settlements`` is empty until locality was proven. ``protocol_version``
    and ``features`` are what both sides speak (``protocol``).
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
    stream: StreamTerms = StreamTerms()
    protocol_version: int = 1
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class LeaseTerms:
    """The right to read one payload, and where its bytes are.

    ``extent`` is set where the payload lies in a slab that the session can open, and None
    where the bytes are to be streamed. ``on_device``: its columns over positions are to be read
    from the slab's device memory, and the slab itself may have no copy of them. Where that is
    not so, the slab has all columns, however the writer was settled. ``encoding``: what its
    stream consists of, where that is not the payload's own bytes. ``as_object``: the bytes are to
    be had from an object store (``ObjectTicket``), and may be streamed.
    """

    lease_id: str
    payload: Payload
    writer_id: str
    extent: Extent | None
    on_device: bool = False
    encoding: Encoding | None = None
    as_object: bool = False


@dataclass(frozen=True, kw_only=True)
class RayHolder:
    """The named actor that hands out references to a server's payloads in a Ray cluster.

    ``cluster_address`` and ``node_id`` say where it lives; they are hints, for messages.
    """

    namespace: str
    name: str
    cluster_address: str = ""
    node_id: str = ""


@dataclass(frozen=True, kw_only=True)
class ObjectTicket:
    """What a lease's reader shows the holder, to be handed the reference of its payload.

    It is good while the lease lasts.
    """

    holder: RayHolder
    object_id: str
    token: bytes


@dataclass(frozen=True, kw_only=True)
class PartTicket:
    """The ticket of an object that holds some rows of a payload, laid out as one of their own.

    ``rows`` and ``positions`` are their places in the payload.
    """

    ticket: ObjectTicket
    rows: range
    positions: range


@dataclass(frozen=True, kw_only=True)
class StoredTicket:
    """The tickets of a payload that lies in the stores of the nodes where it was computed.

    ``parts`` are in the order of their rows, and tile the payload.
    """

    parts: tuple[PartTicket, ...]


@dataclass(frozen=True, kw_only=True)
class StepGrant:
    """The right to read all that a step holds of a student rank's rows.

    ``leases`` are in the order of their rows, one a payload that holds some of them; where the
    bytes are streamed, the lease's payload has the rank's rows only. ``real_rows`` counts the
    step's rows that are no padding. ``global_count`` are the positions of the whole step that
    count, None where its publishers registered no masks. ``settlements`` name the writers that
    the session has not been told of before.

    With ``awaited`` it is announced, and not sealed yet: these are the extents of all its payloads,
    whoever reads them, and it may be read once each of their slots holds its generation.
    """

    step: int
    leases: tuple[LeaseTerms, ...]
    real_rows: int
    global_count: int | None = None
    settlements: tuple[Settlement, ...] = ()
    awaited: tuple[Extent, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepWithdrawn:
    """A step that was announced and will not come as it was: its leases are void."""

    step: int


@dataclass(frozen=True, kw_only=True)
class StepFailure:
    """Why a step that a student wants cannot be had."""

    step: int
    error: TeacherLogitsError


@dataclass(frozen=True, kw_only=True)
class RoomFreed:
    """Payloads of a publisher that nobody reads any more: their room is its own again.

    ``lowest_open_step`` is the lowest step that lacks a shard.
    """

    payload_ids: tuple[str, ...]
    lowest_open_step: int


@dataclass(frozen=True, kw_only=True)
class SlabsGone:
    """Publishers' slabs that a student was passed, and in which nothing will ever lie again."""

    slab_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WritersCame:
    """Device memory of writers that came after a student's proofs, to be opened on trial now."""

    probes: tuple[DeviceProbe, ...]


Mail: TypeAlias = "StepGrant | StepFailure | StepWithdrawn | RoomFreed | SlabsGone | WritersCame"
"""What the server sends ahead over a line."""


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """The right to write one payload of a step.

    ``is_repeat``: its rows were sealed before, and the seal is refused unless the bytes are
    the same. ``lowest_open_step`` as in ``RoomFreed``. ``host_copy``: as things are, what lies in
    device memory needs host copies to be sealed.
    """

    payload_id: str
    is_repeat: bool
    lowest_open_step: int
    host_copy: bool = False
