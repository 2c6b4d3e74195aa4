"""``inspect --parity``: what a service hands out, beside what was computed elsewhere.

Rows are scored by the service as a student has them scored, or a registered step of theirs is
acquired; then ``compare_with_reference``. Promises: it is a student like any other, of its own
name, and leaves as soon as it has read. What a student would refuse it refuses too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import ConfigError, UnknownTeacherError
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_client.connecting import connect
from teacher_logits_client.labels import next_token_labels
from teacher_logits_client.parity import compare_with_reference
from teacher_logits_client.parity_sources import FLAG, LocalModel, is_file_of_tensors, read_file

if TYPE_CHECKING:
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_client.config import Address
    from teacher_logits_client.parity import Parity, Place
    from teacher_logits_client.parity_sources import Computed
    from teacher_logits_client.student import Session
    from teacher_logits_client.targets import Targets

DEFAULT_ROWS = 4
ROW_TOKENS = 64
"""Rows that are drawn for a local model, and their tokens."""
_TOP_K = 64
_STUDENT_ID = "inspect-parity"


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
    """What came of it."""

    address: str
    teacher_id: str
    engine: str
    arithmetic_type: str
    reference: str
    transport: str
    rows: int
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
            f"{self.rows:,} rows; {100 * own.shared_ids:.1f} % of the ids are among the "
            "reference's own first",
            f"difference  max abs diff {own.max_abs_diff:.4g} nats, mean {own.mean_abs_diff:.4g}; "
            f"tolerance {own.tolerance:g}",
            f"worst        {_place_text(own.worst)}",
        ]
        if own.served_loss is not None and own.reference_loss is not None:
            lines.append(
                f"loss         {own.served_loss:.4f} served, {own.reference_loss:.4f} by the "
                "reference (mean -log p of the token that comes next, in nats)"
            )
        if own.first_difference is None:
            return "\n".join([*lines, "verdict     the same numbers"])
        return "\n".join(
            [
                *lines,
                f"verdict      DIFFERENT at {own.differing_positions:,} of {own.positions:,} "
                f"positions, first {_place_text(own.first_difference)}",
                f"cause        {own.cause}",
            ]
        )


def find_parity(address: Address, question: Question, *, insecure: bool, timeout: float) -> Found:
    """Ask the server and compare.

    Raises:
        ConfigError: the reference cannot be read, or belongs to no step that is asked for.
        SessionRefusedError: the teacher refuses such a student, for its tokenizer for one.
        AlignmentError, PayloadInvalidError: what a student would refuse, or that cannot be
            compared.
        NotAvailable: the server did not answer, or has no such step.
    """
    teacher = _teacher(address, question.teacher_id, timeout)
    computed, fingerprint = _compute(question, teacher)
    grid = teacher.batch_grid
    size = 1 if grid is None or question.step is None else grid.global_batch_size
    profile = StudentProfile(
        batch_grid=BatchGrid(global_batch_size=size, data_parallel_size=1, micro_batch_size=size),
        teacher_id=teacher.teacher_id,
        tokenizer_fingerprint=fingerprint,
        top_k=min(_TOP_K, teacher.top_k),
        student_id=_STUDENT_ID,
    )
    with (
        connect(str(address), timeout=timeout, insecure=insecure) as client,
        client.open_session(profile, prefetch=0) as session,
    ):
        transport, parity = _ask(session, computed, question, timeout)
    return Found(
        address=str(address),
        teacher_id=teacher.teacher_id,
        engine=teacher.engine,
        arithmetic_type=teacher.arithmetic_type,
        reference=computed.name,
        transport=transport,
        rows=len(computed.rows),
        parity=parity,
    )


def _compute(question: Question, teacher: TeacherProfile) -> tuple[Computed, str]:
    """Return the reference, and the fingerprint of its tokenizer, empty where it has none."""
    if is_file_of_tensors(question.reference):
        return read_file(question.reference, row_limit=question.row_count), ""
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
    return computed, model.fingerprint


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


def _teacher(address: Address, teacher_id: str, timeout: float) -> TeacherProfile:
    """Return what the server says of the teacher; it needs no name where there is but one."""
    teachers = inspect_server(address, timeout=timeout).teachers
    fitting = [each for each in teachers if teacher_id in ("", each.teacher_id)]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(each.teacher_id for each in teachers) or "none"
    raise UnknownTeacherError(
        f"there is no one teacher {teacher_id!r} at {address}; the teachers there are {there}: "
        "name one with --teacher-id",
        facts={"teacher_id": teacher_id, "teachers": there},
    )


def _place_text(place: Place) -> str:
    return (
        f"row {place.row}, position {place.position}, id {place.token_id}: {place.served:.4f} "
        f"served, {place.reference:.4f} by the reference"
    )
