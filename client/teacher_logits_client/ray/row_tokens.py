"""Of what tokens a payload's rows are: told by the teacher's worker, compared by the student's.

A step, row order and shape that agree do not prove that both sides have the same tokens: a batch
may have been shuffled or padded anew between them. The teacher's digests travel with the payload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.digest import row_digest
from teacher_logits.errors import AlignmentError, PayloadInvalidError
from teacher_logits_client.ray.descriptions import RowTokens

if TYPE_CHECKING:
    from teacher_logits_client.ray.descriptions import PayloadDescription


def tokens_of(
    input_ids: torch.Tensor | None, lengths: torch.Tensor | None = None
) -> RowTokens | None:
    """Return the digest of each row of ``input_ids`` [N,S], or None where none are given.

    ``lengths`` [N] leave each row's padding out.

    Raises:
        PayloadInvalidError: there are not as many lengths as rows, or they reach beyond them.
    """
    if input_ids is None:
        return None
    told = None if lengths is None else tuple(int(each) for each in lengths)
    counts = (input_ids.shape[1],) * len(input_ids) if told is None else told
    return RowTokens(digests=_digests(input_ids, counts), lengths=told)


def check_tokens(
    told: PayloadDescription, input_ids: torch.Tensor, lengths: torch.Tensor | None
) -> None:
    """Let a payload pass whose rows are those of ``input_ids``; one that says nothing passes too.

    Lengths are compared where both sides have them; else a row's tokens are all that the teacher
    had, padding included.

    Raises:
        AlignmentError: a row is of another length or of other tokens; which one.
    """
    if told.tokens is None:
        return
    theirs = told.tokens.lengths
    if theirs is not None and lengths is not None:
        for place, (has, mine) in enumerate(zip(theirs, lengths.tolist(), strict=True)):
            if has != mine:
                raise AlignmentError(
                    f"row {told.rows[place]} of the batch had {has} tokens for teacher rank "
                    f"{told.data_parallel_rank}, and the student's has {mine}",
                    facts={"row": told.rows[place], "has": has, "wanted": mine},
                )
    own = _digests(input_ids, (input_ids.shape[1],) * len(input_ids) if theirs is None else theirs)
    for place, (has_digest, own_digest) in enumerate(zip(told.tokens.digests, own, strict=True)):
        if has_digest != own_digest:
            raise AlignmentError(
                f"row {told.rows[place]} of the batch was other tokens for teacher rank "
                f"{told.data_parallel_rank}: digest {has_digest.hex()}, and the student's is "
                f"{own_digest.hex()}",
                facts={
                    "row": told.rows[place],
                    "place": place,
                    "has": has_digest.hex(),
                    "wanted": own_digest.hex(),
                },
            )


def _digests(input_ids: torch.Tensor, counts: tuple[int, ...]) -> tuple[bytes, ...]:
    ids = input_ids.detach().to("cpu", torch.int32)
    if len(counts) != len(ids) or not all(0 <= each <= ids.shape[1] for each in counts):
        raise PayloadInvalidError(
            f"tokens of shape {tuple(ids.shape)} have {len(counts)} lengths up to "
            f"{max(counts, default=0)}: give one a row, within it",
            facts={"shape": str(tuple(ids.shape)), "lengths": len(counts)},
        )
    return tuple(row_digest(row[:count].numpy()) for row, count in zip(ids, counts, strict=True))
