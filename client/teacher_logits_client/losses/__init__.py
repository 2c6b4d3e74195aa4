"""Losses of a student against a teacher's targets: sums and counts, never means.

One place divides, once, by the whole step's count (math note 4): a mean over a micro batch
would weigh its tokens by how the batch was cut.
"""

from teacher_logits_client.losses.divergences import forward_kl

__all__ = ["forward_kl"]
