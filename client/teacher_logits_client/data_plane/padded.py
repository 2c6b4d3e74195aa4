"""Padded fields: what was read from a store, as rectangles with the mask of their tokens.

    nested [N,j], [N,j,K]   ->   [N,S], [N,S,K] and bool [N,S], true at tokens

S is the longest row, or more where that is asked for. What stands at padding is each field's own
(``fields.PAD_VALUES``; 0 for those that are not the teacher's). The mask says where; for a field
of the teacher it is not needed to be safe, for any other it is.

A store gives everything back nested, and rows of equal shape are made dense again. So a field
that is dense here has rows of its own width: one of which the lengths say otherwise was packed
by somebody as a rectangle, padding and all, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_whole
from teacher_logits_client.data_plane.fields import PAD_VALUES, TOKEN_ALIGNED
from teacher_logits_client.data_plane.jagged import (
    Lengths,
    check_fields,
    flat_rows,
    lengths_of_rows,
    refuse_other_lengths,
    row_lengths,
    token_mask,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """``fields`` of N rows, S wide where token-aligned; ``lengths`` int64 [N], on the CPU.

    ``mask`` bool [N,S] is true at tokens, on the fields' device.
    """

    fields: dict[str, torch.Tensor]
    lengths: torch.Tensor
    mask: torch.Tensor


def pad_jagged(
    fields: Mapping[str, torch.Tensor],
    *,
    lengths: Lengths | None = None,
    token_aligned: Collection[str] = TOKEN_ALIGNED,
    pad_values: Mapping[str, float] = PAD_VALUES,
    pad_to_seqlen: int = 0,
) -> Padded:
    """Return token-aligned fields as rectangles, the others as they are.

    Args:
        fields: nested, or dense where all rows have the same shape.
        lengths: tokens of each row [N], which the fields have to have. Without, they are the
            fields' own, of which at least one is token-aligned.
        token_aligned: the fields whose rows have an entry a token.
        pad_values: what to write at padding, by field; 0 for those that are not named.
        pad_to_seqlen: the width that all ranks pad to; 0 for the longest row's.

    Raises:
        PayloadInvalidError: rows of differing lengths in two fields; a width below the longest
            row, of which ranks would run at differing ones; a nested field that nobody declared.
    """
    check_fields(fields)
    aligned = {name: value for name, value in fields.items() if name in token_aligned}
    found = {name: _lengths_in(name, value) for name, value in aligned.items()}
    if lengths is None and not found:
        raise PayloadInvalidError(
            f"none of {', '.join(fields) or 'no fields'} is token-aligned and no lengths were "
            "given: nothing says where the tokens are"
        )
    sizes = next(iter(found.values())) if lengths is None else row_lengths(lengths)
    for name, own in found.items():
        if len(own) != len(sizes):
            raise _other_rows(name, len(own), len(sizes))
        refuse_other_lengths(name, own, sizes)
    width = _width(int(sizes.max()) if len(sizes) else 0, pad_to_seqlen)
    made = {}
    for name, value in fields.items():
        if name in aligned:
            made[name] = _pad(name, value, sizes, width=width, pad=pad_values.get(name, 0))
        else:
            _check_undeclared(name, value)
            made[name] = value
    like = next(iter(aligned.values()), torch.empty(0, 0))
    return Padded(fields=made, lengths=sizes, mask=token_mask(sizes, like, width))


def make_dense(fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return fields with those dense, as views, whose rows all have the same shape."""
    made = {}
    for name, value in fields.items():
        rows = value.unbind() if value.is_nested else ()
        same = len({row.shape for row in rows}) == 1
        made[name] = flat_rows(value).view(len(rows), *rows[0].shape) if same else value
    return made


def _lengths_in(name: str, value: torch.Tensor) -> torch.Tensor:
    if value.is_nested:
        return lengths_of_rows(value)
    if value.dim() < 2:
        raise PayloadInvalidError(
            f"{name} has shape {tuple(value.shape)} and is declared token-aligned: that is [rows, "
            "tokens] or more",
            facts={"field": name, "axes": value.dim()},
        )
    return torch.full((len(value),), value.shape[1], dtype=torch.int64)


def _width(longest: int, wanted: int) -> int:
    if not is_whole(wanted) or (wanted and wanted < longest):
        raise PayloadInvalidError(
            f"pad_to_seqlen is {wanted!r} and the longest row has {longest} tokens: ranks would "
            "run at differing widths; mint it of all rows (RowMeta.with_pad_target)",
            facts={"pad_to_seqlen": repr(wanted), "longest": longest},
        )
    return max(longest, wanted)


def _pad(
    name: str, value: torch.Tensor, sizes: torch.Tensor, *, width: int, pad: float
) -> torch.Tensor:
    if not value.is_nested and value.shape[1] == width:
        return value
    flat = flat_rows(value) if value.is_nested else value.flatten(0, 1)
    whole = not (flat.dtype.is_floating_point or flat.dtype.is_complex)
    if not isinstance(pad, Real) or (whole and not _holds(flat.dtype, pad)):
        raise PayloadInvalidError(
            f"{name} is {flat.dtype} and is to be padded with {pad!r}: give a whole number that it "
            "holds, or of floats any",
            facts={"field": name, "pad_value": repr(pad)},
        )
    filling = int(pad) if whole else pad
    made = flat.new_full((len(sizes), width, *flat.shape[1:]), filling)
    made[token_mask(sizes, made)] = flat
    return made


def _holds(dtype: torch.dtype, pad: float) -> bool:
    """Say whether a type of whole numbers, or of truth values, has a number."""
    if dtype is torch.bool:
        return pad in (0, 1)
    info = torch.iinfo(dtype)
    return info.min <= pad <= info.max and pad == int(pad)


def _check_undeclared(name: str, value: torch.Tensor) -> None:
    if value.is_nested:
        lengths = sorted({len(row) for row in value.unbind()})
        raise PayloadInvalidError(
            f"{name} has rows of {lengths[0]} to {lengths[-1]} entries and nobody declared it "
            "token-aligned: name it in token_aligned, or leave it out",
            facts={"field": name, "shortest": lengths[0], "longest": lengths[-1]},
        )


def _other_rows(name: str, rows: int, lengths: int) -> PayloadInvalidError:
    return PayloadInvalidError(
        f"{name} has {rows} rows and there are {lengths}: a row is missing, or is there twice",
        facts={"field": name, "rows": rows, "lengths": lengths},
    )
