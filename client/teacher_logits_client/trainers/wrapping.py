"""How a ``Trainer`` has several ranks by accelerate, and where that goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer

    from teacher_logits_client.trainers.batch_rows import BatchRows


def let_it_be_wrapped(trainer: Trainer) -> None:
    """Have a model that was evaluated before its training wrapped for that all the same.

    accelerate marks a model that it prepares for an evaluation, and takes it for wrapped when
    the training begins: each rank would then train a model of its own, on its own gradients.
    """
    if trainer.args.world_size > 1 and trainer.model_wrapped is trainer.model:
        vars(trainer.model).pop("_is_accelerate_prepared", None)


def without_repeats(trainer: Trainer, rows: BatchRows) -> BatchRows:
    """Return an evaluation's last batch, in which rows that are repeats count nowhere.

    Where ranks have unequal shares, accelerate fills up the last batch from the start.
    """
    remainder = int(trainer.accelerator.gradient_state.remainder)
    if trainer.args.world_size == 1 or remainder <= 0:
        return rows
    before = data_rank(trainer) * len(rows.rows)
    return rows.first_rows(min(max(remainder - before, 0), len(rows.rows)))


def data_rank(trainer: Trainer) -> int:
    """Return which of the ranks with batches of their own this one is; copies are the same one."""
    return int(trainer.args.process_index) // copies_of_batches(trainer)


def copies_of_batches(trainer: Trainer) -> int:
    """Return how many ranks have the same batch: those that are tensor parallel."""
    return int(trainer.get_tp_size()) if hasattr(trainer, "get_tp_size") else 1
