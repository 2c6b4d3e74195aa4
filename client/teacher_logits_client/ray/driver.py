"""The driver's side: every replica's answer heard, one payload a rank handed on, the way told.

    agreement = agree(StepPlan(...))                       # before the teacher computes
    answers = [each.top_k.remote(...) for each in teachers]  # every replica
    handed = hand_over(answers, agreement, step=step)
    losses = [each.train.remote(shard, handed.arguments[rank]) for rank, each in ...]
    fetch(losses, what="the student's step")

``arguments`` are references as Ray gave them, never put or wrapped again; Ray resolves each in the
student worker because it is an argument of its own. Keep ``handed`` until the students are done: it
holds the payloads.

Promises: no payload comes to the driver on the deferred way. A replica that failed fails the call
with its own error, the representative's or not, before any payload is handed on. Refuses answers
of another type, number, step, row order, length, K, type or vocabulary than agreed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from teacher_logits.errors import GridMismatchError, PayloadInvalidError, Violation
from teacher_logits.grid import is_whole
from teacher_logits_client.ray.agreement import Path
from teacher_logits_client.ray.descriptions import Expected, check_description
from teacher_logits_client.ray.fetching import DEADLINE_SECONDS, fetch
from teacher_logits_client.ray.materialising import materialise
from teacher_logits_client.ray.rooms import DeferredPayload
from teacher_logits_client.ray.slab_references import SlabReference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.ray.agreement import Agreement
    from teacher_logits_client.ray.descriptions import PayloadDescription


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """What each student rank is to be given, the way that it took, and why no shorter one.

    ``arguments[d]`` goes to every worker of student rank d: a reference to an object, or to a slab
    of a teacher worker on the node. ``descriptions[d]`` says what it is.
    """

    path: Path
    reason: Violation | None
    arguments: tuple[object, ...]
    descriptions: tuple[PayloadDescription, ...]


def hand_over(
    answers: Sequence[object],
    agreement: Agreement,
    *,
    step: int,
    timeout: float = DEADLINE_SECONDS,
) -> HandedOver:
    """Return what every student rank is to be given of a step, by the way that was agreed on.

    ``answers`` are those of every worker of the teacher, or references to them. Where the payloads
    are of another length than the student's batch, and the rows' lengths say that padding alone is
    at stake, they take the materialised way in place of the deferred one.

    Raises:
        PayloadInvalidError: an answer is not as agreed; the message says which, and how it differs.
        DeadlinePassedError, ProducerLostError, ObjectLostError: see ``fetching``.
        Whatever a replica raised.
    """
    if not is_whole(step):
        raise PayloadInvalidError(
            f"step is {step!r}: give a whole number, the one that is trained",
            facts={"step": repr(step)},
        )
    heard = fetch(answers, timeout=timeout, what=f"the teacher's answers of step {step}")
    chosen = one_of_each_rank(heard, agreement)
    plan = agreement.plan
    reason = agreement.reason or _other_length(chosen, agreement)
    for rank, payload in enumerate(chosen):
        expected = Expected(
            step=step,
            rows=agreement.teacher_rows[rank],
            sequence_length=plan.sequence_length if reason is None else None,
            top_k=plan.top_k,
            vocabulary_size=plan.vocabulary_size,
        )
        check_description(payload.description, expected)
    if reason is None:
        return HandedOver(
            path=Path.DEFERRED,
            reason=None,
            arguments=tuple(_argument(payload) for payload in chosen),
            descriptions=tuple(payload.description for payload in chosen),
        )
    references, descriptions = materialise(chosen, agreement, step=step, timeout=timeout)
    return HandedOver(
        path=Path.MATERIALISED, reason=reason, arguments=references, descriptions=descriptions
    )


def require_deferred(agreement: Agreement) -> None:
    """Let an agreement pass on the deferred way, for who would rather not have the other one.

    Raises:
        GridMismatchError: it takes the materialised way; the violation says why.
    """
    if agreement.reason is not None:
        raise GridMismatchError([agreement.reason])


def one_of_each_rank(heard: Sequence[object], agreement: Agreement) -> list[DeferredPayload]:
    """Return the representative answer of each of the teacher's ranks, once all agree with it.

    Raises:
        PayloadInvalidError: an answer of another type; a rank without a payload, or none of the
            teacher's; replicas of a rank that say different things.
    """
    ranks = len(agreement.teacher_rows)
    chosen: dict[int, DeferredPayload] = {}
    said: dict[int, PayloadDescription] = {}
    for place, answer in enumerate(heard):
        if not isinstance(answer, DeferredPayload):
            raise PayloadInvalidError(
                f"teacher worker {place} answered {type(answer).__name__}: return what "
                "DeferredTeacher.put returns",
                facts={"place": place, "type": type(answer).__name__},
            )
        told = replace(answer.description, id_range=None)  # of equal values the ids may differ
        rank = told.data_parallel_rank
        if told != said.setdefault(rank, told):
            raise PayloadInvalidError(
                f"replicas of teacher rank {rank} describe different payloads, worker {place} the "
                "last: one of them computed another step or other rows",
                facts={"data_parallel_rank": rank, "place": place},
            )
        if answer.source is not None:
            chosen.setdefault(rank, answer)
    if chosen.keys() != set(range(ranks)) or said.keys() != chosen.keys():
        has = sorted(chosen)
        raise PayloadInvalidError(
            f"{len(heard)} workers gave payloads of ranks {has} and answers of {sorted(said)}, and "
            f"the teacher's data-parallel ranks are 0 to {ranks - 1}: give hand_over the answers "
            "of all workers, each DeferredTeacher its own data_parallel_rank, and let one of a "
            "rank be representative",
            facts={"answers": len(heard), "ranks": ranks, "given": str(has)},
        )
    return [chosen[rank] for rank in range(ranks)]


def _other_length(chosen: list[DeferredPayload], agreement: Agreement) -> Violation | None:
    """Return why payloads have to be padded or cut, where it is known that this loses nothing."""
    wanted = agreement.plan.sequence_length
    lengths = {payload.description.shape[1] for payload in chosen}
    if wanted is None or agreement.plan.lengths is None or lengths == {wanted}:
        return None
    return Violation(
        rule="sequence_length_mismatch",
        message=f"payloads have {sorted(lengths)} positions a row and the batch {wanted}",
        facts={"positions": str(sorted(lengths)), "wanted": wanted},
    )


def _argument(payload: DeferredPayload) -> object:
    """Return what Ray resolves in the student worker: the reference itself, as it is."""
    return payload if isinstance(payload.source, SlabReference) else payload.source
