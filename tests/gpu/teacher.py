"""The teacher of the service's stages: a profile for each size, and values that tell the step.

A step's log-probabilities are one number, so that a look at any of them says whether it is that
step's: what was there before, or half of it, is found out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

import teacher_logits_client as tl

if TYPE_CHECKING:
    from collections.abc import Mapping

ROWS = 8
TOP_K = 512
VOCABULARY = 1024
BYTES_A_POSITION = 6 * TOP_K + 12


def tokens_of(size_bytes: int) -> int:
    """Return the tokens a row of a payload of about so many bytes, at least 2."""
    return max(2, size_bytes // (BYTES_A_POSITION * ROWS))


def profile_of(name: str, tokens: int) -> tl.TeacherProfile:
    """Return the profile of a teacher of rows of so many tokens."""
    return tl.TeacherProfile(
        teacher_id=name,
        vocabulary_size=VOCABULARY,
        head_rows=VOCABULARY,
        top_k=TOP_K,
        max_row_tokens=max(2, tokens),
        batch_grid=tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=1),
    )


def value_of(step: int) -> float:
    """Return the log-probability of each entry of a step, as float16 keeps it."""
    exact = -math.log(VOCABULARY) - (step % 64) / 64
    return float(torch.tensor(exact, dtype=torch.float16))


def write(draft: tl.Draft, step: int) -> None:
    """Fill a draft with a step's values, where they are read; the device is not waited for."""
    columns = draft.columns
    device = columns["topk_ids"].device
    entries = torch.arange(TOP_K, dtype=torch.int32, device=device)
    columns["topk_ids"].copy_(entries.expand_as(columns["topk_ids"]))
    columns["topk_logprobs"].fill_(value_of(step))
    columns["log_tail"].fill_(math.log1p(-TOP_K * math.exp(value_of(step))))
    columns["logsumexp"].fill_(0.0)
    columns["actual_logprob"].fill_(value_of(step)).view(ROWS, -1)[:, -1] = 0.0


def wrong_entries(columns: Mapping[str, torch.Tensor], step: int) -> int:
    """Count the entries that are not of a step; reads all of them, where they are."""
    logprobs, ids = columns["topk_logprobs"], columns["topk_ids"]
    expected = torch.arange(TOP_K, dtype=torch.int32, device=ids.device)
    chunk = max(1, (64 << 20) // TOP_K)
    wrong = 0
    for start in range(0, len(ids), chunk):
        part = slice(start, start + chunk)
        wrong += int((logprobs[part] != value_of(step)).sum())
        wrong += int((ids[part] != expected).sum())
    return wrong
