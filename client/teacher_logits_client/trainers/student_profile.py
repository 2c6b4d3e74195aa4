"""What a rank of a ``Trainer`` says of itself to the teacher's server."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits.tokenizer import Tokenizer, fingerprint_of, id_count

if TYPE_CHECKING:
    from teacher_logits_client.trainers.objective import Objective


def profile_of(
    *,
    top_k: int,
    objective: Objective,
    teacher_id: str,
    tokenizer: object,
    rank: int,
    ranks: int,
    batch_size: int,
    accumulation: int,
) -> StudentProfile:
    """Return a rank's profile; the grid is that of one accumulated batch over all ranks.

    ``tokenizer`` is what the trainer has as its processing class: where it is a tokenizer, its
    fingerprint and its size are held against the teacher's; else both stay unchecked.
    """
    own = cast("Tokenizer", tokenizer) if hasattr(tokenizer, "get_vocab") else None
    return StudentProfile(
        batch_grid=BatchGrid(
            global_batch_size=batch_size * accumulation * ranks,
            data_parallel_size=ranks,
            micro_batch_size=batch_size,
        ),
        data_parallel_rank=rank,
        teacher_id=teacher_id,
        tokenizer_fingerprint="" if own is None else fingerprint_of(own),
        vocabulary_size=0 if own is None else id_count(own),
        top_k=top_k,
        temperatures=objective.other_temperatures,
    )
