"""Whether the tensors of a batch are of their kind and shape, told by the name of their key.

Promises that what torch would say of shapes in the middle of a sum is said here, of the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence

WHOLE, FLOATS, NUMBERS = "whole numbers", "floats", "numbers or truth values"


def check_array(name: str, given: object, *, kind: str, shape: Sequence[int | None]) -> None:
    """Let one array of a kind pass, neither nested nor sparse; a None of ``shape`` is any size.

    Raises:
        PayloadInvalidError: it is something else.
    """
    if isinstance(given, torch.Tensor):
        is_array = given.layout is torch.strided and not given.is_nested
        if is_array and _is(kind, given.dtype) and _fits(tuple(given.shape), shape):
            return
    wanted = ", ".join("any" if each is None else str(each) for each in shape)
    raise PayloadInvalidError(
        f"{name} is {_told(given)}: give one array of {kind}, of shape [{wanted}]",
        facts={"name": name, "given": _told(given), "wanted": f"[{wanted}]"},
    )


def check_learnable(
    positions: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, tail: torch.Tensor | None
) -> None:
    """Let entries [N,S,K] pass of which a loss makes numbers wherever ``positions`` [N,S] count.

    What stands elsewhere is masked, and may be anything.

    Raises:
        PayloadInvalidError: a mask, a value or a tail is NaN or +inf, all values of a position are
            -inf, or an id is beyond int32; with the first position that is so.
    """
    if not values.shape[-1]:
        raise PayloadInvalidError("positions have 0 entries each: give at least one")
    counts = positions != 0
    wrong = {
        "a mask that is no number": positions.isnan(),
        "a value that is NaN or +inf": (values.isnan() | values.isposinf()).any(-1),
        "no value above -inf": values.isneginf().all(-1),
        "an id beyond int32, or below -1": ((ids < -1) | (ids > _MOST_ID)).any(-1),
    }
    if tail is not None:
        wrong["a tail that is NaN or +inf"] = tail.isnan() | tail.isposinf()
        del wrong["no value above -inf"]  # all the mass may be in the tail
    if not torch.stack([(where & counts).any() for where in wrong.values()]).any():
        return  # a device was waited for once
    for what, where in wrong.items():
        found = (where & counts).nonzero()
        if len(found):
            row, position = (int(each) for each in found[0])
            raise PayloadInvalidError(
                f"position {position} of row {row} counts, and has {what}: a loss would spread it "
                "over the whole step",
                facts={"row": row, "position": position, "positions": len(found)},
            )


_MOST_ID = torch.iinfo(torch.int32).max


def lengths_of(given: object, *, rows: int) -> list[int]:
    """Return how many tokens each of ``rows`` rows has, at least 1.

    Raises:
        PayloadInvalidError: it is no tensor of as many whole numbers.
    """
    check_array("lengths", given, kind=WHOLE, shape=(rows,))
    lengths: list[int] = given.tolist()  # type: ignore[attr-defined]
    wrong = [row for row, length in enumerate(lengths) if length < 1]
    if wrong:
        raise PayloadInvalidError(
            f"row {wrong[0]} has a length of {lengths[wrong[0]]}: a row has at least 1 token",
            facts={"row": wrong[0], "length": lengths[wrong[0]]},
        )
    return lengths


def rows_of_key(name: str, given: torch.Tensor, *, axes: int) -> list[torch.Tensor]:
    """Return the rows of a key, each with ``axes``, whether they are nested or padded.

    Raises:
        PayloadInvalidError: it has no such rows.
    """
    if given.is_nested:
        rows = list(given.unbind())
    elif given.layout is torch.strided and given.dim():
        rows = list(given)
    else:
        rows = []
    if not rows or any(each.dim() != axes for each in rows):
        raise PayloadInvalidError(
            f"{name} is {_told(given)}: give rows of {axes} axes, nested or padded",
            facts={"name": name, "given": _told(given)},
        )
    return rows


def _is(kind: str, dtype: torch.dtype) -> bool:
    if kind == NUMBERS:
        return not dtype.is_complex
    if kind == FLOATS:
        return dtype.is_floating_point
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _fits(shape: tuple[int, ...], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        want in (None, size) for size, want in zip(shape, wanted, strict=True)
    )


def _told(given: object) -> str:
    if not isinstance(given, torch.Tensor):
        return f"a {type(given).__name__}"
    if given.is_nested or given.layout is not torch.strided:
        return f"a {'nested' if given.is_nested else given.layout} tensor of {given.dtype}"
    return f"a tensor of {given.dtype} and shape {tuple(given.shape)}"
