"""What a rank of a ``Trainer`` says of itself to the teacher's server."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile, VocabularyPolicy
from teacher_logits.tokenizer import Tokenizer, fingerprint_of, id_count
from teacher_logits_client.trainers.vocabulary import rows_of_head

if TYPE_CHECKING:
    from teacher_logits_client.trainers.objective import Objective


def profile_of(
    *,
    top_k: int,
    objective: Objective,
    teacher_id: str,
    tokenizer: object,
    model: object,
    policy: VocabularyPolicy,
    rank: int,
    ranks: int,
    batch_size: int,
    accumulation: int,
) -> StudentProfile:
    """Return a rank's profile; the grid is that of one accumulated batch over all ranks.

    ``tokenizer`` is what the trainer has as its processing class: where it is a tokenizer, or
    has one, its fingerprint and its size are held against the teacher's; else both stay
    unchecked. Where the teacher's ids are to be cut, it is at the student's head, or at a smaller
    tokenizer's.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    own = cast("Tokenizer", tokenizer) if hasattr(tokenizer, "get_vocab") else None
    size = 0 if own is None else id_count(own)
    rows = rows_of_head(model)
    if policy is VocabularyPolicy.TRUNCATE and rows:
        size = min(size or rows, rows)
    return StudentProfile(
        batch_grid=BatchGrid(
            global_batch_size=batch_size * accumulation * ranks,
            data_parallel_size=ranks,
            micro_batch_size=batch_size,
        ),
        data_parallel_rank=rank,
        teacher_id=teacher_id,
        tokenizer_fingerprint="" if own is None else fingerprint_of(own),
        vocabulary_size=size,
        vocabulary_policy=policy,
        top_k=top_k,
        temperatures=objective.other_temperatures,
    )
