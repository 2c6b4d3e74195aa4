"""What NeMo RL's floor adds: it weighs each id outside the K by itself, and no bucket can.

With log-probability F at every id outside, reverse KL has there the sum of q_j (log q_j - F).
By the chain rule that is q_0 (log q_0 - F - E), with E the entropy of the student's softmax s
among the ids outside: a bucket whose teacher is at F + E. E depends on the logits in its turn,

    dE/dz_j = -s_j (log s_j + E)        so        dD/dz_j = s_j (c_0 + q_0 E + q_0 log s_j)

and q_0 is the one number a position that backward needs beside those of any other loss.
"""

from __future__ import annotations

import torch

from teacher_logits.selection.complement import without
from teacher_logits_client.targets import ABSENT_LOGPROB


def outside_entropy(
    rows: torch.Tensor, ids: torch.Tensor, log_outside: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return E [R,1] for logits [R,V]; ``log_outside`` [R,1] is L_out, -inf where nothing is."""
    logs = without(rows.to(log_outside.dtype) / temperature, ids)
    logs -= log_outside.masked_fill(log_outside == -torch.inf, 0.0)
    shares = logs.exp()
    return -shares.mul_(logs.clamp_min_(ABSENT_LOGPROB)).sum(1, keepdim=True)
