"""Losses of a student against a teacher's targets or logits: sums and counts, never means.

One place divides, once, by the whole step's count (docs/math.md, "A step in parts"): a mean over a
micro batch would weigh its tokens by how the batch was cut.
"""

from teacher_logits_client.losses.dense import dense_forward_kl, dense_soft_cross_entropy
from teacher_logits_client.losses.divergences import (
    forward_kl,
    logprob_mse,
    reverse_kl,
    soft_cross_entropy,
    total_variation,
)
from teacher_logits_client.losses.head_logits import HeadLogits, from_hidden
from teacher_logits_client.losses.mixtures import generalised_jsd, skew_kl, skew_reverse_kl
from teacher_logits_client.losses.sharding import VocabShard
from teacher_logits_client.losses.tails import Tail

__all__ = [
    "HeadLogits",
    "Tail",
    "VocabShard",
    "dense_forward_kl",
    "dense_soft_cross_entropy",
    "forward_kl",
    "from_hidden",
    "generalised_jsd",
    "logprob_mse",
    "reverse_kl",
    "skew_kl",
    "skew_reverse_kl",
    "soft_cross_entropy",
    "total_variation",
]
