"""Jagged fields: padded rows to nested tensors, without their padding.

    [N,S] and [N,S,K], with lengths [N]   ->   nested [N,j] and [N,j,K], row i of lengths[i] tokens

Promises that a field declared token-aligned comes out jagged, bit for bit, its rows of exactly
their lengths. Refuses, with the numbers, all that NeMo RL's codec packs as a rectangle without a
word: no rows, fewer than two axes, as many rows as there are not lengths, rows narrower than the
longest. Padding is cut away only as wide as the caller says that it is. What was packed is a
copy, detached; what was nested already is itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_whole
from teacher_logits_client.data_plane.fields import TOKEN_ALIGNED

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Lengths: TypeAlias = "torch.Tensor | Sequence[int]"
_MOST = torch.iinfo(torch.int64).max


def pack_jagged(
    fields: Mapping[str, torch.Tensor],
    lengths: Lengths,
    *,
    token_aligned: Collection[str] = TOKEN_ALIGNED,
    padded_to: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return fields of N rows, those of ``token_aligned`` nested and without padding.

    Args:
        fields: tensors with N rows; a token-aligned one is [N,S] or [N,S,...], as wide as the
            longest row, or nested already. The others have a row's own shape.
        lengths: tokens of each row [N]; 0 is one.
        padded_to: how wide token-aligned fields are that have more padding than to the longest
            row (sequence parallelism pads to a multiple). It is cut away; any other width stays
            an error.

    Raises:
        PayloadInvalidError: naming the field and the numbers.
    """
    check_fields(fields)
    sizes = row_lengths(lengths)
    longest = int(sizes.max())
    if padded_to is not None and not (is_whole(padded_to) and padded_to >= longest):
        raise PayloadInvalidError(
            f"padded_to is {padded_to!r} and the longest row has {longest} tokens: give the "
            "fields' width, which is at least that",
            facts={"padded_to": repr(padded_to), "longest": longest},
        )
    packed = {}
    for name, value in fields.items():
        check_rows(name, value, len(sizes))
        if name not in token_aligned:
            packed[name] = value.detach().contiguous()
        elif value.is_nested:
            packed[name] = _checked_nested(name, value, sizes)
        else:
            _check_width(name, value, longest=longest, padded_to=padded_to)
            packed[name] = nest(value.detach()[token_mask(sizes, value)], sizes)
    return packed


def check_fields(fields: object) -> None:
    """Let a mapping of names to tensors pass that have their bytes.

    Raises:
        PayloadInvalidError: it is something else.
    """
    if not isinstance(fields, Mapping):
        raise PayloadInvalidError(
            f"fields are a {type(fields).__name__}: give a mapping of names to tensors",
            facts={"given": type(fields).__name__},
        )
    for name, value in fields.items():
        check_tensor(name, value)


def check_tensor(name: str, value: object) -> torch.Tensor:
    """Return a tensor, nested or not, that has its bytes.

    Raises:
        PayloadInvalidError: it is something else.
    """
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise PayloadInvalidError(
            f"{name} is a {type(value).__name__}: only tensors are fields here; what else a row "
            "has is its tags",
            facts={"field": name, "given": type(value).__name__},
        )
    return value


def row_lengths(lengths: Lengths) -> torch.Tensor:
    """Return the tokens of each row as int64 [N] on the CPU.

    Raises:
        PayloadInvalidError: they are no whole numbers from 0 on, or there is no row.
    """
    given = lengths if isinstance(lengths, torch.Tensor) else _tensor(lengths)
    whole = not (given.dtype.is_floating_point or given.dtype.is_complex)
    if given.dim() != 1 or not len(given) or not whole or given.dtype is torch.bool:
        raise PayloadInvalidError(
            f"lengths have shape {tuple(given.shape)} and are {given.dtype}: give a whole number "
            "for each of at least one row; without rows there is nothing to write",
            facts={"shape": str(tuple(given.shape)), "type": str(given.dtype)},
        )
    sizes = given.detach().to("cpu", torch.int64)
    if int(sizes.min()) < 0:
        row = int((sizes < 0).nonzero()[0])
        raise PayloadInvalidError(
            f"row {row} of {len(sizes)} has a length of {int(sizes[row])}: it is 0 at least",
            facts={"row": row, "rows": len(sizes), "length": int(sizes[row])},
        )
    return sizes


def nest(flat: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return rows that lie flat one behind the other as one nested tensor, without a copy."""
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(flat.device)
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(flat, offsets)
    return nested


def token_mask(sizes: torch.Tensor, like: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Return bool [N,S], true at tokens: S is the width of ``like``, or the one given."""
    places = torch.arange(like.shape[1] if width is None else width, device=like.device)
    return places < sizes.to(like.device).unsqueeze(1)


def flat_rows(nested: torch.Tensor) -> torch.Tensor:
    """Return the rows of a nested tensor one behind the other, without a copy where they lie so."""
    rows = nested.unbind()
    packed = nested.layout is torch.jagged and len(nested.values()) == sum(map(len, rows))
    return nested.values() if packed else torch.cat(list(rows))


def lengths_of_rows(nested: torch.Tensor) -> torch.Tensor:
    """Return how long the rows of a nested tensor are, int64 [N] on the CPU."""
    return torch.tensor([len(row) for row in nested.unbind()], dtype=torch.int64)


def check_rows(name: str, value: object, rows: int) -> None:
    """Let a tensor pass, nested or not, that has its bytes, and so many rows.

    Raises:
        PayloadInvalidError: it has not.
    """
    rows_of = check_tensor(name, value)
    has = len(rows_of.unbind()) if rows_of.is_nested else (len(rows_of) if rows_of.dim() else 0)
    if has != rows:
        raise PayloadInvalidError(
            f"{name} has {has} rows and there are {rows} lengths: one for each row",
            facts={"field": name, "rows": has, "lengths": rows},
        )


def _check_width(name: str, value: torch.Tensor, *, longest: int, padded_to: int | None) -> None:
    if value.dim() < 2 or value.layout is not torch.strided:
        raise PayloadInvalidError(
            f"{name} has shape {tuple(value.shape)} and is declared token-aligned: that is [rows, "
            "tokens] or more; take one number a row out of token_aligned",
            facts={"field": name, "axes": value.dim()},
        )
    width = value.shape[1]
    if width < longest:
        raise PayloadInvalidError(
            f"{name} is {width} tokens wide and the longest row has {longest}: its end is missing",
            facts={"field": name, "width": width, "longest": longest},
        )
    if width not in (longest, padded_to):
        stated = "" if padded_to is None else f", and padded_to says {padded_to}"
        raise PayloadInvalidError(
            f"{name} is {width} tokens wide and the longest row has {longest}{stated}: where the "
            f"rest is padding, say padded_to={width}",
            facts={"field": name, "width": width, "longest": longest, "padded_to": str(padded_to)},
        )


def _checked_nested(name: str, value: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    found = lengths_of_rows(value)
    refuse_other_lengths(name, found, sizes)
    return value.detach()


def refuse_other_lengths(name: str, found: torch.Tensor, sizes: torch.Tensor) -> None:
    """Let a field pass whose rows have their lengths.

    Raises:
        PayloadInvalidError: naming the first row that has not.
    """
    wrong = (found != sizes).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise PayloadInvalidError(
            f"row {row} of {name} has {int(found[row])} tokens, and its length is "
            f"{int(sizes[row])} ({len(wrong)} such rows of {len(sizes)})",
            facts={
                "field": name,
                "row": row,
                "tokens": int(found[row]),
                "length": int(sizes[row]),
                "rows": len(sizes),
            },
        )


def _tensor(lengths: Sequence[int]) -> torch.Tensor:
    if not isinstance(lengths, Iterable):
        raise PayloadInvalidError(
            f"lengths are {lengths!r}: give a whole number a row", facts={"lengths": repr(lengths)}
        )
    lengths = list(lengths)
    wrong = [each for each in lengths if not is_whole(each) or abs(each) > _MOST]
    if wrong:
        raise PayloadInvalidError(
            f"a length is {wrong[0]!r}: give whole numbers", facts={"length": repr(wrong[0])}
        )
    return torch.tensor([int(each) for each in lengths], dtype=torch.int64)
