"""How a ``Trainer`` wraps its model for several ranks, and where that goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer


def let_it_be_wrapped(trainer: Trainer) -> None:
    """Have a model that was evaluated before its training wrapped for that all the same.

    accelerate marks a model that it prepares for an evaluation, and takes it for wrapped when
    the training begins: each rank would then train a model of its own, on its own gradients.
    """
    if trainer.args.world_size > 1 and trainer.model_wrapped is trainer.model:
        vars(trainer.model).pop("_is_accelerate_prepared", None)
