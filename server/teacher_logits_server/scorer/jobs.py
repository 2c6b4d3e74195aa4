"""Scoring jobs: what a session asks for, held against its terms before anything is computed.

``plan`` refuses what can never be scored: shapes that make no sense, ids outside the
vocabulary, rows and requests that are too long, payloads that no pool of this size can hold.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import (
    Column,
    ElementType,
    sampled_columns,
    scored_id_columns,
    top_k_columns,
)
from teacher_logits.payload import Payload
from teacher_logits.selection_rules import TOP_K, ClientIds, Sampled
from teacher_logits_server.engines.chosen_ids import ChosenIds, read_chosen_ids
from teacher_logits_server.engines.keepers import Wanted
from teacher_logits_server.engines.requests import Request, check_request, read_request

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from opentelemetry.trace import Span

    from teacher_logits.errors import PoolFullError
    from teacher_logits.payload import Extent
    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.selection_rules import SelectionRule
    from teacher_logits.terms import LeaseTerms, SessionTerms
    from teacher_logits_server.engines.answers import Answer
    from teacher_logits_server.engines.stored import StoredAnswer
    from teacher_logits_server.ledger import Ledger


HOST, DEVICE, STORES = "host", "device", "stores"
"""Where jobs want room: of a pool of the server's own, or of the nodes of a Ray cluster."""


class BadRows(enum.Enum):
    """What to do about a row with a NaN, a +inf or nothing finite in its logits."""

    REJECT = "reject"
    MASK = "mask"


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """A scoring request as it came over the wire, the session's part of it left out.

    Ids are int32, little-endian, row after row; ``prefix_lengths`` and ``row_windows`` (first
    position and count) have one entry a row or none at all. ``deadline`` is a time of the
    server's clock, in seconds. ``digest`` tells this request from another with the same id.
    ``chosen`` are ids to be scored in place of the session's own selection, and ``seed`` that of
    its sample in place of the session's own.
    """

    session_id: str
    request_id: str
    input_ids: bytes
    row_lengths: tuple[int, ...]
    deadline: float
    prefix_ids: bytes = b""
    prefix_lengths: tuple[int, ...] = ()
    row_windows: tuple[tuple[int, int], ...] = ()
    bad_rows: BadRows = BadRows.REJECT
    digest: bytes = b""
    chosen: ChosenIds | None = None
    seed: int | None = None
    trace: Span | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What a job takes: rows, what is kept, its payload's columns, whose it is, of which pool.

    ``stays``: it takes none, but the stores of the nodes that compute it; ``near`` is the node that
    its reader says it is on.
    """

    request: Request
    top_k: int
    wanted: Wanted
    columns: tuple[Column, ...]
    size_bytes: int
    teacher: TeacherProfile
    on_device: bool = False
    stays: bool = False
    near: str = ""

    @property
    def pool(self) -> str:
        """Whose room it waits for, where it has to."""
        return DEVICE if self.on_device else STORES if self.stays else HOST

    def payload(self, *, payload_id: str, bad_rows: int) -> Payload:
        """Describe the payload that the job has become."""
        return Payload(
            payload_id=payload_id,
            teacher_id=self.teacher.teacher_id,
            teacher_revision=self.teacher.revision,
            first_row=0,
            row_count=self.request.row_count,
            position_count=self.request.position_count,
            top_k=self.top_k,
            temperatures=self.wanted.temperatures,
            vocabulary_size=self.wanted.vocabulary_size,
            columns=self.columns,
            size_bytes=self.size_bytes,
            bad_row_count=bad_rows,
            whole_rows=self.request.has_whole_rows,
            selection=self.wanted.selection,
        )


@dataclass(kw_only=True, eq=False)
class Work:
    """A job on its way through the scorer. Its room belongs to the scorer's thread."""

    ticket: int
    job: ScoreJob
    plan: Plan
    submitted_at: float
    futures: list[Future[LeaseTerms]] = field(default_factory=list)
    extent: Extent | None = None
    answer: Answer | StoredAnswer | None = None
    rows_done: int = 0
    room_error: PoolFullError | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What a retry has in common with it."""
        return self.job.session_id, self.job.request_id


def plan_job(
    job: ScoreJob,
    *,
    ledger: Ledger,
    max_request_tokens: int,
    may_stay: Callable[[int], bool] = lambda size_bytes: False,
) -> Plan:
    """Hold a job against its session, the teacher and the pool.

    ``may_stay`` says whether a payload of a size may stay where it is computed: it does where its
    session reads objects.

    Raises:
        PayloadInvalidError: by row, with the numbers, the rule and the way out.
        PoolFullError: no pool of this size can hold the payload.
        SessionExpiredError, EpochChangedError: the session has ended.
    """
    profile, terms = ledger.profile(job.session_id), ledger.terms(job.session_id)
    _check_size(job, max_request_tokens)
    request = read_request(
        input_ids=job.input_ids,
        row_lengths=job.row_lengths,
        prefix_ids=job.prefix_ids,
        prefix_lengths=job.prefix_lengths,
        row_windows=job.row_windows,
    )
    check_request(
        request,
        vocabulary_size=terms.vocabulary_size,
        teacher_vocabulary_size=terms.teacher.vocabulary_size,
        max_row_tokens=terms.teacher.max_row_tokens,
    )
    top_k = profile.top_k if job.chosen is None else job.chosen.per_position
    wanted = _wanted(job, profile, request, terms=terms)
    columns, size_bytes = _columns(request, wanted, top_k=top_k, profile=profile)
    on_device = ledger.scores_on_device(job.session_id)
    stays = ledger.reads_objects(job.session_id) and may_stay(size_bytes)
    if not stays:
        ledger.check_fits(size_bytes, on_device=on_device, teacher_id=terms.teacher.teacher_id)
    return Plan(
        request=request,
        top_k=top_k,
        wanted=wanted,
        columns=columns,
        size_bytes=size_bytes,
        teacher=terms.teacher,
        on_device=on_device,
        stays=stays,
        near=profile.hints.ray_node_id,
    )


def _wanted(
    job: ScoreJob, profile: StudentProfile, request: Request, *, terms: SessionTerms
) -> Wanted:
    ids = None
    selection = _seeded(profile.selection or TOP_K, job.seed)
    if job.chosen is not None:
        selection = ClientIds()
        ids = read_chosen_ids(
            job.chosen,
            request,
            vocabulary_size=terms.vocabulary_size,
            most=terms.teacher.top_k,
        )
    return Wanted(
        selection=selection,
        temperatures=(1.0,) if isinstance(selection, Sampled) else profile.all_temperatures,
        vocabulary_size=terms.vocabulary_size,
        ids=ids,
    )


def _seeded(selection: SelectionRule, seed: int | None) -> SelectionRule:
    """Return a session's rule with the seed of a request, where it has one."""
    if seed is None:
        return selection
    if not isinstance(selection, Sampled):
        raise PayloadInvalidError(
            f"the request has the seed {seed}, and the session's entries are selected by "
            f"{selection}: leave it out, or open the session with selection=Sampled()",
            facts={"seed": str(seed), "selection": selection.name},
        )
    return Sampled(seed=seed)


def _columns(
    request: Request, wanted: Wanted, *, top_k: int, profile: StudentProfile
) -> tuple[tuple[Column, ...], int]:
    """Place the columns of what is kept; return them and the payload's size in bytes."""
    rows, positions = request.row_count, request.position_count
    if isinstance(wanted.selection, Sampled):
        return sampled_columns(row_count=rows, position_count=positions, entry_count=top_k)
    if isinstance(wanted.selection, ClientIds):
        return scored_id_columns(
            row_count=rows,
            position_count=positions,
            entry_count=top_k,
            temperature_count=len(wanted.temperatures),
        )
    return top_k_columns(
        row_count=rows,
        position_count=positions,
        top_k=top_k,
        temperature_count=len(wanted.temperatures),
        value_type=profile.value_type or ElementType.FLOAT16,
    )


def _check_size(job: ScoreJob, limit: int) -> None:
    tokens = (len(job.input_ids) + len(job.prefix_ids)) // 4
    if tokens > limit:
        raise PayloadInvalidError(
            f"the request holds {tokens} tokens, and the server takes {limit} at a time: send "
            "fewer rows a request, or raise --max-request-tokens on the server",
            facts={"tokens": tokens, "limit": limit},
        )
