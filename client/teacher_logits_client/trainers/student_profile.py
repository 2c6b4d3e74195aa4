"""What a rank of a ``Trainer`` says of itself to the teacher's server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile, VocabularyPolicy
from teacher_logits.tokenizer import Tokenizer, fingerprint_of, id_count
from teacher_logits_client.trainers.vocabulary import policy_of, rows_of_head

if TYPE_CHECKING:
    from teacher_logits_client.trainers.objective import Objective


class Arguments(Protocol):
    """A trainer's arguments: those of ``transformers``, and ``served_arguments``."""

    @property
    def teacher_id(self) -> str: ...
    @property
    def vocabulary_policy(self) -> str: ...
    @property
    def process_index(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def per_device_train_batch_size(self) -> int: ...
    @property
    def gradient_accumulation_steps(self) -> int: ...


class Trains(Protocol):
    """A ``Trainer``, to this module."""

    @property
    def args(self) -> Arguments: ...
    @property
    def processing_class(self) -> object: ...
    @property
    def model(self) -> object: ...


def profile_of(trainer: Trains, *, top_k: int, objective: Objective) -> StudentProfile:
    """Return a rank's profile; the grid is that of one accumulated batch over all ranks.

    Where the trainer's processing class is a tokenizer, or has one, its fingerprint and its size
    are held against the teacher's; else both stay unchecked. Where the teacher's ids are to be
    cut, it is at the student's head, or at a smaller tokenizer's.
    """
    args, tokenizer = trainer.args, trainer.processing_class
    ranks, batch_size = args.world_size, args.per_device_train_batch_size
    policy = policy_of(args.vocabulary_policy)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    own = cast("Tokenizer", tokenizer) if hasattr(tokenizer, "get_vocab") else None
    size = 0 if own is None else id_count(own)
    rows = rows_of_head(trainer.model)
    if policy is VocabularyPolicy.TRUNCATE and rows:
        size = min(size or rows, rows)
    return StudentProfile(
        batch_grid=BatchGrid(
            global_batch_size=batch_size * args.gradient_accumulation_steps * ranks,
            data_parallel_size=ranks,
            micro_batch_size=batch_size,
        ),
        data_parallel_rank=args.process_index,
        teacher_id=args.teacher_id,
        tokenizer_fingerprint="" if own is None else fingerprint_of(own),
        vocabulary_size=size,
        vocabulary_policy=policy,
        top_k=top_k,
        temperatures=objective.other_temperatures,
    )
