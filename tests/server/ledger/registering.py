"""A ledger with published teachers, and the steps that every test of them takes."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta

from teacher_logits import keys
from teacher_logits.clock import ManualClock
from teacher_logits.grid import BatchGrid, rows_of_rank
from teacher_logits.keys import PayloadKey
from teacher_logits.layout import ElementType, top_k_columns
from teacher_logits.payload import Extent, Payload
from teacher_logits.pool import Growth
from teacher_logits.profiles import PROTOCOL_VERSION, NodeHints, StudentProfile, TeacherProfile
from teacher_logits.terms import Reservation, RoomFreed, StepFailure, StepGrant
from teacher_logits.transport import Locality, Transport, proof_of
from teacher_logits_server.ledger import Ledger, OpenedSession
from teacher_logits_server.limit_settings import LimitSettings

PAGE = 4096
EPOCH = "0123456789ab"
SECRET = b"secret of this process"
CHALLENGE = b"what the broker wrote"
SLAB = 64 * PAGE
ALL = frozenset({Transport.LOCAL, Transport.SHARED_MEMORY, Transport.STREAM})


def teacher(*, dp: int = 2, gbs: int = 12, shard: int = 0, **changes: object) -> TeacherProfile:
    given: dict[str, object] = {
        "teacher_id": "teacher",
        "vocabulary_size": 100,
        "head_rows": 128,
        "top_k": 4,
        "max_row_tokens": 512,
        "batch_grid": BatchGrid(global_batch_size=gbs, data_parallel_size=dp, micro_batch_size=1),
        "data_parallel_rank": shard,
        "hints": NodeHints(host_name="node", pid=1000 + shard),
    }
    return TeacherProfile(**{**given, **changes})  # type: ignore[arg-type]


def student(*, dp: int = 1, gbs: int = 12, rank: int = 0, **changes: object) -> StudentProfile:
    given: dict[str, object] = {
        "batch_grid": BatchGrid(global_batch_size=gbs, data_parallel_size=dp, micro_batch_size=1),
        "data_parallel_rank": rank,
        "top_k": 4,
    }
    return StudentProfile(**{**given, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Limits(LimitSettings):
    session_ttl: timedelta = timedelta(seconds=30)
    renew_interval: timedelta = timedelta(seconds=10)
    opening_ttl: timedelta = timedelta(seconds=10)
    default_wait: timedelta = timedelta(seconds=20)
    max_sessions: int = 1000
    max_request_tokens: int = 4096
    pool_size_bytes: int = 64 * PAGE
    slab_size_bytes: int = 16 * PAGE
    max_quarantine: float = 0.5
    keep_steps: int = 0
    keep_deserted: timedelta = timedelta(seconds=60)


class Slots:
    """The server's control pages."""

    def __init__(self) -> None:
        self.marks: dict[tuple[str, int], int] = {}

    def mark(self, extent: Extent, generation: int) -> None:
        self.marks[extent.slab_id, extent.slot] = generation

    def lets_in(self, extent: Extent) -> bool:
        return self.marks.get((extent.slab_id, extent.slot)) == extent.generation


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """A publisher's session, with what it said of itself; local ones have a slab."""

    session_id: str
    profile: TeacherProfile
    slab_id: str
    writer_id: str

    @property
    def streams(self) -> bool:
        return not self.slab_id

    @property
    def rows(self) -> range:
        assert self.profile.batch_grid is not None
        return rows_of_rank(self.profile.batch_grid, self.profile.data_parallel_rank)


class House:
    """A ledger without an engine, unless one is given."""

    def __init__(self, *, limits: Limits | None = None, **changes: object) -> None:
        self.clock = ManualClock()
        self.slots = Slots()
        given: dict[str, object] = {
            "epoch": EPOCH,
            "limits": limits or Limits(),
            "clock": self.clock,
            "slots": self.slots,
            "offered": ALL,
            "local_secret": SECRET,
        }
        self.ledger = Ledger(**{**given, **changes})  # type: ignore[arg-type]
        #: How often each payload of a local publisher was told to be free.
        self.freed: Counter[str] = Counter()
        self.dropped: list[str] = []
        self.ledger.on_slabs_dropped(self.dropped.extend)
        self._names = itertools.count()
        self._slots = itertools.count()

    def name(self) -> str:
        return f"n{next(self._names)}"

    # Sessions

    def open(self, profile: StudentProfile | None = None) -> OpenedSession:
        return self.ledger.open_session(
            request_id=self.name(),
            protocol_version=PROTOCOL_VERSION,
            profile=profile or student(),
        )

    def prove(self, opened: OpenedSession, *, local: bool) -> str:
        session_id = opened.terms.session_id
        proofs = {}
        if local:
            self.ledger.check_hello(session_id, opened.nonce)
            self.ledger.line_opened(session_id, pid=7, challenge=CHALLENGE)
            transport = Transport.SHARED_MEMORY
            proofs[transport] = proof_of(CHALLENGE, nonce=opened.nonce, transport=transport)
        self.ledger.prove_locality(session_id, proofs=proofs, failures=[])
        return session_id

    def read_as(self, profile: StudentProfile | None = None, *, local: bool = True) -> str:
        return self.prove(self.open(profile), local=local)

    def in_process(self, profile: StudentProfile) -> str:
        """Read as a student in the server's own process, without a line."""
        opened = self.open(profile)
        transport = Transport.LOCAL
        mac = proof_of(SECRET, nonce=opened.nonce, transport=transport)
        session_id = opened.terms.session_id
        self.ledger.prove_locality(session_id, proofs={transport: mac}, failures=[])
        return session_id

    def publish_as(self, profile: TeacherProfile | None = None, *, local: bool = True) -> Publisher:
        profile = profile or teacher()
        opened = self.ledger.open_publisher(
            request_id=self.name(), protocol_version=PROTOCOL_VERSION, profile=profile
        )
        session_id = self.prove(opened, local=local)
        (settlement,) = self.ledger.terms(session_id).settlements
        slab_id = f"slab-of-{self.name()}" if local else ""
        if local:
            self.ledger.add_foreign_slab(session_id, slab_id, SLAB)
        return Publisher(
            session_id=session_id,
            profile=profile,
            slab_id=slab_id,
            writer_id=settlement.writer_id,
        )

    def publishers(self, *, dp: int = 2, gbs: int = 12, local: bool = True) -> list[Publisher]:
        return [self.publish_as(teacher(dp=dp, gbs=gbs, shard=s), local=local) for s in range(dp)]

    # Payloads

    def payload(
        self, publisher: Publisher, step: int, rows: range, *, positions: int = 2, **changes: object
    ) -> Payload:
        profile = publisher.profile
        columns, size_bytes = top_k_columns(
            row_count=len(rows),
            position_count=positions * len(rows),
            top_k=profile.top_k,
            temperature_count=1,
            value_type=ElementType.FLOAT16,
        )
        given: dict[str, object] = {
            "payload_id": "",
            "teacher_id": profile.teacher_id,
            "teacher_revision": "",
            "first_row": rows.start,
            "row_count": len(rows),
            "position_count": positions * len(rows),
            "top_k": profile.top_k,
            "temperatures": (1.0,),
            "vocabulary_size": profile.vocabulary_size,
            "columns": columns,
            "size_bytes": size_bytes,
            "key": PayloadKey(
                teacher_id=profile.teacher_id, step=step, shard=profile.data_parallel_rank
            ),
        }
        return Payload(**{**given, **changes})  # type: ignore[arg-type]

    def reserve(
        self,
        publisher: Publisher,
        step: int,
        *,
        rows: range | None = None,
        request_id: str = "",
        real_rows: int = 0,
        positions: int = 2,
        **changes: object,
    ) -> Reservation:
        rows = publisher.rows if rows is None else rows
        payload = self.payload(publisher, step, rows, positions=positions, **changes)
        return self.ledger.reserve_payload(
            publisher.session_id,
            request_id or self.name(),
            payload,
            (positions,) * len(rows),
            real_rows,
        )

    def extent(self, publisher: Publisher, *, page: int | None = None, **changes: object) -> Extent:
        """Room in a local publisher's slab; a fresh page and slot each time."""
        number = next(self._slots) if page is None else page
        given: dict[str, object] = {
            "slab_id": publisher.slab_id,
            "offset_bytes": number % 64 * PAGE,
            "size_bytes": PAGE,
            "slot": number,
            "generation": 2,
        }
        return Extent(**{**given, **changes})  # type: ignore[arg-type]

    def take_room(self, publisher: Publisher, payload_id: str) -> Extent:
        room = self.ledger.payload_room(publisher.session_id, payload_id)
        answer = room.reserve(room.size_bytes)
        if isinstance(answer, Growth):
            room.add_slab(self.name(), answer.size_bytes)
            answer = room.reserve(room.size_bytes)
        assert isinstance(answer, Extent)
        return answer

    def write(self, publisher: Publisher, payload_id: str) -> None:
        with self.ledger.writing(publisher.session_id, payload_id) as writing:
            writing.advance(writing.payload.size_bytes)

    def seal(
        self,
        publisher: Publisher,
        payload_id: str,
        *,
        extent: Extent | None = None,
        valid_count: int | None = None,
        digest: str = "",
        is_said: bool = True,
    ) -> None:
        if extent is None and not publisher.streams:
            extent = self.extent(publisher)
        self.ledger.seal_payload(
            publisher.session_id,
            payload_id,
            extent=extent,
            bad_row_count=0,
            valid_count=valid_count,
            digest=digest,
            is_said=is_said,
        )

    def register(
        self,
        publisher: Publisher,
        step: int,
        *,
        rows: range | None = None,
        real_rows: int = 0,
        valid_count: int | None = None,
    ) -> str:
        payload_id = self.reserve(publisher, step, rows=rows, real_rows=real_rows).payload_id
        if publisher.streams:
            self.take_room(publisher, payload_id)
            self.write(publisher, payload_id)
        self.seal(publisher, payload_id, valid_count=valid_count)
        return payload_id

    # Readers

    def take(self, session_id: str, step: int) -> StepGrant:
        grant = self.ledger.take_step(session_id, self.name(), step)
        assert grant is not None
        return grant

    def give_back(self, session_id: str, grant: StepGrant) -> None:
        for lease in grant.leases:
            self.ledger.release(session_id, lease.lease_id)

    def mail(self, session_id: str) -> list[StepGrant | StepFailure]:
        mail = self.ledger.take_mail(session_id)
        return [each for each in mail if isinstance(each, StepGrant | StepFailure)]

    def hear(self, publisher: Publisher) -> tuple[str, ...]:
        """What a publisher is told to be free."""
        told: tuple[str, ...] = ()
        for each in self.ledger.take_mail(publisher.session_id):
            assert isinstance(each, RoomFreed)
            told += each.payload_ids
        self.freed.update(told)
        return told

    def used(self) -> tuple[int, int]:
        """Pages of the server's pool in use and in quarantine."""
        pool = self.ledger.view().pool
        return pool.used_bytes // PAGE, pool.quarantined_bytes // PAGE

    def registered(self) -> tuple[int, int]:
        """Bytes of the publishers' own slabs in use and in quarantine."""
        view = self.ledger.view().registered
        return view.used_bytes, view.quarantined_bytes


def insisting(profile: StudentProfile) -> StudentProfile:
    return replace(profile, locality=Locality.REQUIRE)


def old_id(kind: str) -> str:
    return keys.new_id(kind, "older")
