"""Fields: what a row of the data plane has, under NeMo RL's names.

    teacher_topk_logits    [tokens, K]   log-probabilities, or raw logits where those are asked for
    teacher_topk_indices   [tokens, K]   ids
    teacher_log_tail       [tokens]      log mass outside the K ids

A field is *token-aligned* where a row has an entry a token: those travel without their padding.
What a trainer does not declare so would travel as a rectangle, padding and all, and what it does
not name among its train fields is never read: ``TopKForm`` gives it both.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_size
from teacher_logits_client.targets import ABSENT_LOGPROB
from teacher_logits_client.trainers.nemo_rl import INDICES, LOGITS, TAIL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ABSENT_ID = -1

TOKEN_ALIGNED = frozenset(
    {
        "advantages",
        "generation_logprobs",
        "input_ids",
        "prev_logprobs",
        "reference_policy_logprobs",
        "routed_experts",
        "token_mask",
        LOGITS,
        INDICES,
        TAIL,
    }
)
"""NeMo RL's registry with the teacher's fields; less ``sample_mask``, one number a row."""

PAD_VALUES: Mapping[str, float] = MappingProxyType(
    {LOGITS: ABSENT_LOGPROB, INDICES: ABSENT_ID, TAIL: 0.0}
)
"""What stands at padding, as in ``Targets``: no entry, and all the mass in the tail. Zeros would
be K equal entries of token 0, a distribution to learn from. A loss that gathers at every position
and masks afterwards fails at an id of -1; it may be given another one, with the mask."""


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One field: its name, its element type, and its ``shape`` a token, or a row if not aligned."""

    name: str
    element_type: torch.dtype
    shape: tuple[int, ...] = ()
    token_aligned: bool = True


@dataclass(frozen=True, kw_only=True)
class TopKForm:
    """The form that a teacher's entries take in a store, the same for all who write or read it.

    Args:
        k: entries a position.
        value_type, index_type: their element types; NeMo RL's by default, 12 bytes an entry.
            bfloat16 and int32 halve that.
        raw_logits: the values are the teacher's logits, of payloads that have them, instead of
            its log-probabilities. NeMo RL's losses take no notice of the difference.
        with_tail: write ``teacher_log_tail`` too, without which targets are renormalised on the K.

    Raises:
        PayloadInvalidError: no such form, or a tail that raw logits know nothing of.
    """

    k: int
    value_type: torch.dtype = torch.float32
    index_type: torch.dtype = torch.int64
    raw_logits: bool = False
    with_tail: bool = True

    def __post_init__(self) -> None:
        if not is_size(self.k):
            raise PayloadInvalidError(
                f"k is {self.k!r}: give a whole number from 1 on", facts={"k": repr(self.k)}
            )
        whole = {torch.int32, torch.int64}
        is_dtype = isinstance(self.value_type, torch.dtype)
        if not (is_dtype and self.value_type.is_floating_point) or self.index_type not in whole:
            raise PayloadInvalidError(
                f"the form has values of {self.value_type} and indices of {self.index_type}: give "
                "a floating-point type, and int32 or int64",
                facts={"value_type": str(self.value_type), "index_type": str(self.index_type)},
            )
        if self.raw_logits and self.with_tail:
            raise PayloadInvalidError(
                "raw logits have no normaliser, so the log mass outside them means nothing beside "
                "them: say with_tail=False, or leave raw_logits out"
            )

    @property
    def specs(self) -> tuple[FieldSpec, ...]:
        """The fields, for ``register`` and for whoever checks what is written."""
        values = FieldSpec(name=LOGITS, element_type=self.value_type, shape=(self.k,))
        ids = FieldSpec(name=INDICES, element_type=self.index_type, shape=(self.k,))
        tail = FieldSpec(name=TAIL, element_type=torch.float32)
        return (values, ids, tail) if self.with_tail else (values, ids)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(spec.name for spec in self.specs)

    def train_fields(self, others: Sequence[str]) -> tuple[str, ...]:
        """Return a trainer's ``train_fields`` with the teacher's behind them, each once.

        Raises:
            PayloadInvalidError: ``others`` is one text, and no list of names.
        """
        if isinstance(others, str):
            raise PayloadInvalidError(
                f"train_fields are {others!r}: give a list of names", facts={"given": others}
            )
        return tuple(dict.fromkeys((*others, *self.names)))
