"""What every payload of these tests says: a pure function of (teacher, step, row, position).

Rows and their token ids follow from the names alone, the logits from the token ids
(``dense_teacher``), and every column from the logits, to the bit. So whoever reads can tell
each byte that is not what its teacher wrote, another step's or another row's included.
"""

import random
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from tests.transport_suite.dense_teacher import VOCABULARY_SIZE, head_logits

from teacher_logits.digest import row_digest
from teacher_logits.selection import select_top_k

TOP_K = 8
TEMPERATURES = (1.0, 2.0)
ENGINE = "engine"
SHORTEST, LONGEST = 20, 60


class WrongBytesError(Exception):
    """A column holds what its teacher did not write there."""


def tokens_of(teacher: str, step: int, row: int) -> list[int]:
    """Return a row's token ids."""
    chance = random.Random(f"{teacher}/{step}/{row}")
    count = chance.randint(SHORTEST, LONGEST)
    return [chance.randrange(VOCABULARY_SIZE) for _ in range(count)]


def rows_of(teacher: str, step: int, rows: Iterable[int]) -> list[list[int]]:
    """Return the token ids of some rows."""
    return [tokens_of(teacher, step, row) for row in rows]


def logits_of(tokens: list[int]) -> torch.Tensor:
    """Return a row's logits [L, head rows]."""
    return head_logits(tokens)


@lru_cache(maxsize=256)  # of what was read last; a soak reads on and on
def _right(teacher: str, step: int, row: int) -> Mapping[str, torch.Tensor]:
    tokens = tokens_of(teacher, step, row)
    kept = select_top_k(
        logits_of(tokens),
        k=TOP_K,
        temperatures=TEMPERATURES,
        vocab_size=VOCABULARY_SIZE,
        next_ids=torch.tensor([*tokens[1:], -1], dtype=torch.int32),
    )
    assert kept.actual_logprob is not None
    return {
        "topk_ids": kept.topk_ids,
        "topk_logprobs": kept.topk_logprobs.half(),
        "log_tail": kept.log_tail,
        "logsumexp": kept.logsumexp,
        "actual_logprob": kept.actual_logprob,
        "row_windows": torch.tensor([[0, len(tokens)]], dtype=torch.int32),
        "row_digests": torch.tensor([list(row_digest(tokens))], dtype=torch.uint8),
        "row_status": torch.zeros(1, dtype=torch.uint8),
    }


def check(
    columns: Mapping[str, torch.Tensor],
    teacher: str,
    step: int,
    rows: Iterable[int],
    *,
    only: Iterable[str] = (),
) -> None:
    """Hold every column that is there against what is right, or those named in ``only``.

    Raises:
        WrongBytesError: naming the column, and the row and element where it begins.
    """
    wanted = list(rows)
    right = [_right(teacher, step, row) for row in wanted]
    for name in only or columns:
        if name == "row_offsets":
            lengths = [0, *(len(each["topk_ids"]) for each in right)]
            expected = [torch.tensor(lengths).cumsum(0)]
        else:
            expected = [each[name] for each in right]
        _compare(name, columns[name], torch.cat(expected), f"{teacher}, step {step}, {wanted}")


def _compare(name: str, found: torch.Tensor, right: torch.Tensor, where: str) -> None:
    if found.shape != right.shape or found.dtype != right.dtype:
        raise WrongBytesError(
            f"{where}: {name} is {found.dtype} {list(found.shape)}, not {right.dtype} "
            f"{list(right.shape)}"
        )
    as_bytes = [each.contiguous().view(torch.uint8).flatten() for each in (found, right)]
    differ = (as_bytes[0] != as_bytes[1]).nonzero()
    if len(differ):
        raise WrongBytesError(
            f"{where}: {name} differs in {len(differ)} of {len(as_bytes[0])} bytes, from byte "
            f"{int(differ[0])} on"
        )
