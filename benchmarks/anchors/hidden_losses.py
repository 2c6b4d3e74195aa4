"""Anchors: a forward KL and its gradients from hidden states, as others have it.

    dense_autograd      this loss in plain autograd: all logits, the tail over the complement
    trl_sparse_tail     TRL's sparse loss with its tail bucket, 128 tokens a chunk (PyPI: trl)
    liger_chunked_jsd   Liger's chunked JSD at beta 0, 128 tokens a chunk (PyPI: liger-kernel),
                        eager, as a CPU has it; against the teacher's hidden states and head,
                        which is another loss: the dense one
    trl_chunked_dense   TRL's chunked divergence, tiles of 128 x 4096; that loss as well

Each takes a `Case` and returns the sum over positions; `backward` of it is the rest. What is
not installed raises ImportError when it is called for the first time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK, COLUMNS = 128, 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Hidden states [P,H] and weight [V,H] that want gradients, and what the teacher says."""

    hidden: torch.Tensor
    weight: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor
    log_tail: torch.Tensor
    teacher_hidden: torch.Tensor

    def first(self, count: int) -> Case:
        """Return the case of the first positions alone."""
        return Case(
            hidden=self.hidden[:count].detach().requires_grad_(),
            weight=self.weight,
            ids=self.ids[:count],
            logprobs=self.logprobs[:count],
            log_tail=self.log_tail[:count],
            teacher_hidden=self.teacher_hidden[:count],
        )


def dense_autograd(case: Case) -> torch.Tensor:
    """All logits at once, [P,V], and what autograd makes of them."""
    logits = case.hidden @ case.weight.t()
    outside = logits.scatter(1, case.ids, -torch.inf).logsumexp(1, keepdim=True)
    log_q = torch.cat([logits.gather(1, case.ids), outside], 1).log_softmax(1)
    log_p = torch.cat([case.logprobs, case.log_tail.unsqueeze(1)], 1)
    return (log_p.exp() * (log_p - log_q)).sum()


def trl_sparse_tail(case: Case) -> torch.Tensor:
    """TRL 1.16's loss of its asynchronous distillation, which its server trainer shares."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_distillation import async_distillation_trainer as trl

    present = torch.ones_like(case.ids, dtype=torch.bool)
    loss: torch.Tensor = trl._chunked_jsd_loss(
        hidden_valid=case.hidden,
        lm_head_weight=case.weight,
        lm_head_bias=None,
        logit_scale=1.0,
        final_logit_softcapping=None,
        target_ids=case.ids,
        teacher_target_logps=case.logprobs,
        valid_candidate_mask=present,
        beta=0.0,
        temperature=1.0,
        add_tail_bucket=True,
        teacher_id_idx=None,
        num_teachers=1,
        chunk_size=CHUNK,
    )[0]
    return loss


def liger_chunked_jsd(case: Case) -> torch.Tensor:
    """Liger's fused linear JSD; its mean over positions times their number."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False, chunk_size=CHUNK
    )
    labels = torch.zeros(len(case.hidden), dtype=torch.long)
    mean: torch.Tensor = loss(
        case.hidden, case.weight, case.teacher_hidden, case.weight.detach(), labels
    )
    return mean * len(case.hidden)


def trl_chunked_dense(case: Case) -> torch.Tensor:
    """TRL's chunked divergence of two heads, by its fallback in torch."""
    from trl.kernels import chunked_divergence as trl

    trl.TOKEN_CHUNK_SIZE, trl.VOCAB_CHUNK_SIZE = CHUNK, COLUMNS
    each: torch.Tensor = trl.ChunkedDivergenceFunction.apply(
        case.hidden, case.weight, None, case.teacher_hidden, case.weight.detach(), None, 0.0
    )[0]
    return each.sum()


HIDDEN_LOSSES: dict[str, Callable[[Case], torch.Tensor]] = {
    each.__name__: each
    for each in (dense_autograd, trl_sparse_tail, liger_chunked_jsd, trl_chunked_dense)
}
