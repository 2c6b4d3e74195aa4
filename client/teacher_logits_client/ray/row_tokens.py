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
from teacher_logits_client.ray.given import whole_numbers

if TYPE_CHECKING:
    from teacher_logits_client.ray.descriptions import PayloadDescription


def tokens_of(
    input_ids: torch.Tensor | None,
    lengths: torch.Tensor | None = None,
    *,
    width: int | None = None,
) -> RowTokens | None:
    """Return the digest of each row of ``input_ids`` [N,S], or None where none are given.

    ``lengths`` [N] leave each row's padding out. The payload is ``width`` positions wide.

    Raises:
        PayloadInvalidError: they are no token ids; there are not as many lengths as rows, or they
            reach beyond them, or beyond the payload; or lengths came without tokens.
    """
    told = None if lengths is None else whole_numbers(lengths, what="lengths")
    if input_ids is None:
        if told is not None:
            raise PayloadInvalidError(
                "lengths came without input_ids: they say where the padding of those begins"
            )
        return None
    check_ids(input_ids)
    counts = (input_ids.shape[1],) * len(input_ids) if told is None else told
    if width is not None and max(counts, default=0) > width:
        raise PayloadInvalidError(
            f"a row has {max(counts)} tokens and the payload {width} positions a row: give the "
            "tokens that it was made of, and lengths where they are padded further",
            facts={"tokens": max(counts), "positions": width},
        )
    return RowTokens(digests=_digests(input_ids, counts), lengths=told)


def check_ids(input_ids: object) -> None:
    """Let a padded tensor [N,S] of token ids pass.

    Raises:
        PayloadInvalidError: it is something else, or an id is none: below 0, or beyond int32.
    """
    is_dense = isinstance(input_ids, torch.Tensor) and not (
        input_ids.is_nested or input_ids.layout is not torch.strided
    )
    if not is_dense or input_ids.dim() != 2 or input_ids.dtype not in _ID_DTYPES:  # type: ignore[attr-defined]
        told = type(input_ids).__name__
        if isinstance(input_ids, torch.Tensor):
            shape = "nested" if input_ids.is_nested else tuple(input_ids.shape)
            told = f"{input_ids.dtype} {shape}"
        raise PayloadInvalidError(
            f"input_ids is {told}: give a padded tensor [N,S] of whole numbers",
            facts={"given": told},
        )


_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MOST_ID = torch.iinfo(torch.int32).max


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
    check_ids(input_ids)
    theirs = told.tokens.lengths
    if theirs is not None and lengths is not None:
        own_lengths = whole_numbers(lengths, what="input_lengths")
        for place, (has, mine) in enumerate(zip(theirs, own_lengths, strict=True)):
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
    ids = input_ids.detach().to("cpu", torch.int64)
    if len(counts) != len(ids) or not all(0 <= each <= ids.shape[1] for each in counts):
        raise PayloadInvalidError(
            f"tokens of shape {tuple(ids.shape)} have {len(counts)} lengths up to "
            f"{max(counts, default=0)}: give one a row, within it",
            facts={"shape": str(tuple(ids.shape)), "lengths": len(counts)},
        )
    real = torch.arange(ids.shape[1]) < torch.tensor(counts, dtype=torch.int64).unsqueeze(1)
    told = ids[real]
    if told.numel() and not 0 <= int(told.min()) <= int(told.max()) <= _MOST_ID:
        raise PayloadInvalidError(
            f"input_ids go from {int(told.min())} to {int(told.max())}: a token id is a whole "
            f"number from 0 to {_MOST_ID}; where padding is none, give lengths",
            facts={"least": int(told.min()), "greatest": int(told.max())},
        )
    ids = ids.to(torch.int32)
    return tuple(row_digest(row[:count].numpy()) for row, count in zip(ids, counts, strict=True))
