"""The student: a small Llama with random weights, and what a training step does to it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from teacher_logits_client.losses import forward_kl

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits_client.demo.config import StudentSize
    from teacher_logits_client.targets import Targets

_WARM_UP_STEPS = 20
_LAST_RATE = 0.05
"""The learning rate ends at this part of its peak."""
_GRADIENT_NORM = 1.0


class Student:
    """A model and its optimizer. ``half`` computes in bfloat16 where that keeps enough digits."""

    def __init__(
        self,
        *,
        vocabulary_size: int,
        row_tokens: int,
        size: StudentSize,
        learning_rate: float,
        seed: int,
        half: bool,
    ) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        self.model: torch.nn.Module = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary_size,
                hidden_size=size.width,
                intermediate_size=3 * size.width,
                num_hidden_layers=size.layer_count,
                num_attention_heads=size.head_count,
                num_key_value_heads=size.head_count,
                max_position_embeddings=row_tokens,
                tie_word_embeddings=True,
                use_cache=False,
            )
        )
        self._peak = learning_rate
        self._half = half
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._step = 0

    @property
    def parameter_count(self) -> int:
        """Numbers to learn, those of the embedding included."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [N,S,V] of rows [N,S]."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._half):
            logits: torch.Tensor = self.model(input_ids=rows).logits
        return logits

    def learn(self, rows: torch.Tensor, targets: Targets, *, progress: float) -> float:
        """Take one step towards the teacher; return the mean divergence before it, in nats.

        ``progress`` says how much of the training is over, from 0 to 1.
        """
        return self.descend(rows, lambda logits: forward_kl(logits, targets), progress=progress)

    def descend(
        self,
        rows: torch.Tensor,
        loss_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        *,
        progress: float,
    ) -> float:
        """Take one step down any loss, and return its mean before it.

        ``loss_of`` takes the logits [N,S,V] of ``rows``, and returns a sum and a count.
        """
        self._step += 1
        rate = self._peak * _share_of_peak(self._step, progress)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss_sum, count = loss_of(self.logits(rows))
        loss = loss_sum / count
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _GRADIENT_NORM)
        self._optimizer.step()
        return float(loss.detach())


def _share_of_peak(step: int, progress: float) -> float:
    """Warm up over the first steps, then fall as a cosine does."""
    falling = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, step / _WARM_UP_STEPS) * falling
