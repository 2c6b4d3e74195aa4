"""``inspect --parity``: what a service hands out, beside what was computed elsewhere.

Rows are scored by the service as a student has them scored, or a registered step of theirs is
acquired; then ``compare_with_reference``. Promises: it is a student like any other, of its own
name, and leaves as soon as it has read. What a student would refuse it refuses too. It says
beforehand that a step goes with it, where no other student is there for which the step is kept.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import (
    AlignmentError,
    ConfigError,
    PayloadInvalidError,
    UnknownTeacherError,
)
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_client.connecting import connect_to
from teacher_logits_client.parity import compare_with_reference
from teacher_logits_client.parity.sources import (
    FLAG,
    LocalModel,
    is_file_of_tensors,
    read_file,
    refusal,
)
from teacher_logits_client.rows.labels import next_token_labels

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.addresses import Address
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.views import ServerView
    from teacher_logits_client.config import Connection
    from teacher_logits_client.parity import Parity, Place
    from teacher_logits_client.parity.sources import Computed
    from teacher_logits_client.student import Session
    from teacher_logits_client.targets import Targets

DEFAULT_ROWS = 4
ROW_TOKENS = 64
"""Rows that are drawn for a local model, and their tokens."""
_TOP_K = 64
_STUDENT_ID = "inspect-parity"
_LEFT = ("closed", "died", "ended")
"""States of a session for which no step is kept."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to compare: the reference's path, how many rows, how far off they may be.

    ``row_count`` None is all of a file, and ``DEFAULT_ROWS`` for a model. ``step`` is the
    registered step whose rows the file has; None has the rows scored.
    """

    reference: str
    row_count: int | None
    step: int | None
    tolerance: float
    teacher_id: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of it. ``notes``: what the reader of a difference should know."""

    address: str
    teacher_id: str
    engine: str
    arithmetic_type: str
    reference: str
    transport: str
    rows: int
    notes: tuple[str, ...]
    parity: Parity

    def to_json(self) -> str:
        """Return one JSON object, with stable keys; differences in nats."""
        document = {
            **{name: value for name, value in asdict(self).items() if name != "parity"},
            "holds": self.parity.holds,
            "cause": self.parity.cause,
            **asdict(self.parity),
        }
        return json.dumps(document, indent=2)

    def to_text(self) -> str:
        """Return a few lines for people."""
        own = self.parity
        lines = [
            f"served       teacher {self.teacher_id} at {self.address}, engine "
            f"{self.engine or 'unknown'} in {self.arithmetic_type or 'unknown arithmetic'}, over "
            f"{self.transport}",
            f"reference    {self.reference}",
            f"compared     {own.entries:,} log-probabilities at {own.positions:,} positions of "
            f"{self.rows:,} rows; {100 * own.shared_ids:.1f} % of the {own.top_k} ids of a "
            f"position are among the reference's own first {own.reference_ids}",
            f"difference   max abs diff {own.max_abs_diff:.4g} nats, mean {own.mean_abs_diff:.4g}; "
            f"tolerance {own.tolerance:g}",
            f"worst        {_place_text(own.worst)}",
        ]
        if own.served_loss is not None and own.reference_loss is not None:
            lines.append(
                f"loss         {own.served_loss:.4f} served, {own.reference_loss:.4f} by the "
                "reference (mean -log p of the token that comes next, in nats)"
            )
        if own.first_difference is None:
            return "\n".join([*lines, "verdict      the same numbers"])
        return "\n".join(
            [
                *lines,
                f"verdict      DIFFERENT at {own.differing_positions:,} of {own.positions:,} "
                f"positions, first {_place_text(own.first_difference)}",
                f"cause        {own.cause}",
                *(f"note         {each}" for each in self.notes),
            ]
        )


def find_parity(
    connection: Connection,
    question: Question,
    *,
    timeout: float,
    warn: Callable[[str], None],
) -> Found:
    """Ask the server and compare.

    Args:
        warn: told what is to be known before anything is read, or beside what is raised.

    Raises:
        ConfigError: the reference cannot be read, has too few columns, or belongs to no step that
            is asked for.
        SessionRefusedError: the teacher refuses such a student, for its tokenizer for one.
        AlignmentError, PayloadInvalidError: what a student would refuse, or that cannot be
            compared.
        NotAvailable: the server did not answer, or has no such step.
    """
    address = connection.address
    view = inspect_server(address, credentials=connection.credentials, timeout=timeout)
    teacher = _teacher(view, address, question.teacher_id)
    _check_step(view, teacher, question)
    computed, fingerprint = _compute(question, teacher)
    if question.step is not None and _may_take_step(view, teacher):
        warn(
            f"no student of teacher {teacher.teacher_id!r} is there: step {question.step} goes "
            "with it once this command has read it, and is not there for students that come later"
        )
    with (
        connect_to(connection, timeout=timeout) as client,
        client.open_session(_profile(teacher, fingerprint), prefetch=0) as session,
    ):
        try:
            transport, parity = _ask(session, computed, question, timeout)
        except (AlignmentError, PayloadInvalidError):
            for note in computed.notes:
                warn(note)
            raise
    return Found(
        address=str(address),
        teacher_id=teacher.teacher_id,
        engine=teacher.engine,
        arithmetic_type=teacher.arithmetic_type,
        reference=computed.name,
        transport=transport,
        rows=len(computed.rows),
        notes=computed.notes,
        parity=parity,
    )


def _profile(teacher: TeacherProfile, fingerprint: str) -> StudentProfile:
    grid = teacher.batch_grid
    size = 1 if grid is None else grid.global_batch_size
    return StudentProfile(
        batch_grid=BatchGrid(global_batch_size=size, data_parallel_size=1, micro_batch_size=size),
        teacher_id=teacher.teacher_id,
        tokenizer_fingerprint=fingerprint,
        top_k=min(_TOP_K, teacher.top_k),
        student_id=_STUDENT_ID,
    )


def _compute(question: Question, teacher: TeacherProfile) -> tuple[Computed, str]:
    """Return the reference, and the fingerprint of its tokenizer, empty where it has none."""
    if is_file_of_tensors(question.reference):
        computed = read_file(question.reference, row_limit=question.row_count)
        _check_columns(computed, teacher)
        return computed, ""
    if question.step is not None:
        raise ConfigError(
            f"{FLAG} with --step needs the step's own rows and what they should say: write them "
            "into a .npz or .safetensors",
            facts={"flag": "--step", "value": question.step},
        )
    model = LocalModel(question.reference, arithmetic_type=teacher.arithmetic_type)
    computed = model.score(
        row_count=DEFAULT_ROWS if question.row_count is None else question.row_count,
        row_tokens=min(ROW_TOKENS, teacher.max_row_tokens),
        id_count=teacher.vocabulary_size,
    )
    _check_columns(computed, teacher)
    return computed, model.fingerprint


def _check_columns(computed: Computed, teacher: TeacherProfile) -> None:
    """Refuse logits of fewer ids than the teacher has: they are normalised over others."""
    given = computed.reference
    if isinstance(given, torch.Tensor) and given.shape[-1] < teacher.vocabulary_size:
        raise refusal(
            computed.name,
            f"has {given.shape[-1]:,} columns, and the teacher {teacher.vocabulary_size:,} ids: "
            "give whole rows of the head",
        )


def _check_step(view: ServerView, teacher: TeacherProfile, question: Question) -> None:
    """Refuse to have rows scored by a teacher that is published: before it sees a student."""
    if question.step is not None:
        return
    if _is_published(view, teacher):
        steps = sorted(each.step for each in view.steps if each.teacher_id == teacher.teacher_id)
        there = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise ConfigError(
            f"teacher {teacher.teacher_id!r} is published, and nobody here scores rows for it: "
            f"give --step, and the step's own rows in a file with {FLAG} (steps there: {there})",
            facts={"flag": "--step", "teacher_id": teacher.teacher_id, "steps": there},
        )


def _is_published(view: ServerView, teacher: TeacherProfile) -> bool:
    """Whether the teacher registers what it says, as far as can be seen."""
    named = {each.teacher_id for each in view.sessions if each.kind == "publisher"}
    return teacher.teacher_id in named | {each.teacher_id for each in view.steps}


def _may_take_step(view: ServerView, teacher: TeacherProfile) -> bool:
    """Whether there may be steps of this teacher, and none is kept for somebody else."""
    return _is_published(view, teacher) and not any(
        each.kind == "student" and each.teacher_id == teacher.teacher_id and each.state not in _LEFT
        for each in view.sessions
    )


def _ask(
    session: Session, computed: Computed, question: Question, timeout: float
) -> tuple[str, Parity]:
    """Have the rows scored, or acquire their step; return how it came, and what it is worth."""
    if question.step is None:
        with session.score(computed.rows, timeout=timeout).result() as payload:
            return payload.transport.value, _compare(payload.targets, computed, session, question)
    step = question.step
    with session.acquire(step=step, input_ids=computed.rows, timeout=timeout) as batch:
        names = sorted({each.value for each in batch.transports.values()})
        return ", ".join(names), _compare(batch.targets, computed, session, question)


def _compare(targets: Targets, computed: Computed, session: Session, question: Question) -> Parity:
    lengths = torch.tensor([0, *map(len, computed.rows)])
    flat = torch.tensor([token for row in computed.rows for token in row])
    return compare_with_reference(
        targets,
        computed.reference,
        next_ids=next_token_labels(flat, lengths.cumsum(0), ignore_index=-1),
        vocabulary_size=session.teacher.vocabulary_size,
        tolerance=question.tolerance,
    )


def _teacher(view: ServerView, address: Address, teacher_id: str) -> TeacherProfile:
    """Return what the server says of the teacher; it needs no name where there is but one."""
    teachers = view.teachers
    fitting = [each for each in teachers if teacher_id in ("", each.teacher_id)]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(each.teacher_id for each in teachers)
    way_out = f"name one of {there} with --teacher-id" if there else "start its publishers"
    raise UnknownTeacherError(
        f"no one teacher {teacher_id!r} is there, at {address}: {way_out}",
        facts={"teacher_id": teacher_id, "teachers": there},
    )


def _place_text(place: Place) -> str:
    return (
        f"row {place.row}, position {place.position}, id {place.token_id}: {place.served:.4f} "
        f"served, {place.reference:.4f} by the reference"
    )
