"""Checks of what logits are selected by: every refusal that can be made, with its numbers.

What is no tensor, no whole number or no list of numbers is refused as any wrong number is.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_whole
from teacher_logits.payload import MAX_TEMPERATURES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.errors import Fact

LOGIT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_OUT_TYPES = {"topk_logprobs": LOGIT_TYPES, "topk_logits": (torch.float32, torch.bfloat16)}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-30, 1e30
"""Beyond these, a logit divided by the temperature is nothing that fp32 holds."""


def check_logits(logits: torch.Tensor, vocab_size: int | None) -> int:
    """Return how many columns of ``logits`` are vocabulary and not padding."""
    check_tensor(logits, "logits")
    shape = tuple(logits.shape)
    if logits.dtype not in LOGIT_TYPES:
        raise _invalid(
            f"logits are {_name(logits.dtype)}; give float32, bfloat16 or float16",
            dtype=_name(logits.dtype),
        )
    if logits.dim() not in (2, 3) or shape[-1] < 1:
        raise _invalid(
            f"logits have shape {shape}; give [positions, vocabulary] or [rows, positions, "
            "vocabulary], with a vocabulary of at least 1",
            axes=logits.dim(),
            columns=shape[-1] if shape else 0,
        )
    if vocab_size is None:
        return shape[-1]
    check_whole(vocab_size, "vocab_size")
    if vocab_size > shape[-1]:
        raise _invalid(
            f"the vocabulary has {vocab_size} ids and the logits have fewer columns, "
            f"{shape[-1]}: give logits of the whole vocabulary, or select_partial what is a shard "
            f"of them; vocab_size counts the columns that are no padding, 1 to {shape[-1]}",
            vocab_size=vocab_size,
            columns=shape[-1],
        )
    if vocab_size < 1:
        raise _invalid(
            f"vocab_size is {vocab_size}; it counts those of {shape[-1]} columns that are no "
            f"padding, from 1 to {shape[-1]}",
            vocab_size=vocab_size,
            columns=shape[-1],
        )
    return int(vocab_size)


def check_tensor(given: object, what: str) -> None:
    """Refuse what is no tensor of plain memory."""
    if not isinstance(given, torch.Tensor):
        raise _invalid(
            f"{what} are {reprlib.repr(given)}, a {type(given).__name__}: give a torch tensor",
            given=type(given).__name__,
        )
    if given.layout != torch.strided:
        layout = str(given.layout).removeprefix("torch.")
        raise _invalid(f"{what} are {layout}: give a dense tensor", layout=layout)


def check_whole(given: object, what: str) -> None:
    """Refuse what is no whole number."""
    if not is_whole(given):
        raise _invalid(
            f"{what} is {reprlib.repr(given)}, a {type(given).__name__}: give a whole number",
            given=type(given).__name__,
        )


def check_k_given(k: int | None) -> int:
    """Return ``k``; only what takes the selection may know it instead."""
    if k is None:
        raise _invalid("k is not given: say how many entries a position are kept")
    return k


def check_takes(out: object) -> None:
    """Refuse what is neither a selection nor takes one."""
    if not callable(getattr(out, "select", None)):
        raise _invalid(
            f"out is {reprlib.repr(out)}, a {type(out).__name__}: give a Selection, whose tensors "
            "take the result, a publisher's draft or a part of one, or leave it out",
            given=type(out).__name__,
        )


def check_settings(k: int, temperatures: Sequence[float]) -> None:
    """Refuse a ``k`` below 1, and temperatures that are not 1.0 and up to 4 others."""
    check_whole(k, "k")
    if k < 1:
        raise _invalid(f"k is {k}; at least 1 entry a position is kept", k=k)
    temperatures = _numbers(temperatures)
    given = ", ".join(f"{t:g}" for t in temperatures)
    if not 1 <= len(temperatures) <= MAX_TEMPERATURES:
        raise _invalid(
            f"{len(temperatures)} temperatures are given ({given}); give 1.0 and at most "
            f"{MAX_TEMPERATURES - 1} others",
            temperature_count=len(temperatures),
            limit=MAX_TEMPERATURES,
        )
    for place, temperature in enumerate(temperatures):
        if not _LEAST_TEMPERATURE <= temperature <= _MOST_TEMPERATURE:
            raise _invalid(
                f"temperature {place} is {temperature:g}; temperatures are finite and above 0, "
                f"from {_LEAST_TEMPERATURE:g} to {_MOST_TEMPERATURE:g}",
                place=place,
                temperature=temperature,
            )
    if temperatures[0] != 1.0:
        raise _invalid(
            f"the first temperature is {temperatures[0]:g} (of {given}); it is always 1.0, since "
            "log-probabilities are stored at temperature 1: put 1.0 before the others",
            temperature=temperatures[0],
        )
    if len(set(temperatures)) < len(temperatures):
        raise _invalid(
            f"a temperature is named twice ({given}); name each once",
            temperature_count=len(temperatures),
            distinct=len(set(temperatures)),
        )


def _numbers(temperatures: object) -> list[float]:
    """Return temperatures that are a list of numbers; a tensor of them would be a device's."""
    if isinstance(temperatures, Sequence) and not isinstance(temperatures, str):
        reals = [t for t in temperatures if isinstance(t, Real) and not isinstance(t, bool)]
        if len(reals) == len(temperatures):
            return [_number(t) for t in reals]
    raise _invalid(
        f"temperatures are {reprlib.repr(temperatures)}, a {type(temperatures).__name__}: give "
        "a tuple of numbers, 1.0 first, such as (1.0, 2.0)",
        given=type(temperatures).__name__,
    )


def _number(value: Real) -> float:
    """Return a number; a whole one may be beyond any float, and is infinity then."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_next_ids(next_ids: torch.Tensor, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return ``next_ids`` as int64 [P], beside the logits."""
    check_tensor(next_ids, "next_ids")
    shape = tuple(logits.shape[:-1])
    positions = math.prod(shape)
    if next_ids.dtype not in INTEGERS or tuple(next_ids.shape) not in (shape, (positions,)):
        raise _invalid(
            f"next_ids are {_name(next_ids.dtype)} of shape {tuple(next_ids.shape)}; give an "
            f"integer a position, of shape {shape}",
            dtype=_name(next_ids.dtype),
            positions=positions,
        )
    flat = next_ids.reshape(-1).to(logits.device, torch.int64)
    wrong = ((flat < -1) | (flat >= vocab_size)).nonzero()
    if len(wrong):
        position = int(wrong[0])
        raise _invalid(
            f"next_ids[{position}] is {int(flat[position])}, outside the vocabulary of "
            f"{vocab_size} ({len(wrong)} such positions); give ids from 0 to {vocab_size - 1}, "
            "or -1 where no token comes next",
            position=position,
            token_id=int(flat[position]),
            vocab_size=vocab_size,
            wrong_positions=len(wrong),
        )
    return flat


def check_out(
    out: Mapping[str, torch.Tensor | None], wanted: Mapping[str, torch.Tensor | None]
) -> None:
    """Refuse tensors that cannot take those of the same name in ``wanted``, which may be meta."""
    for name, want in wanted.items():
        target = out[name]
        if target is None or want is None:
            if target is want:
                continue
            given, missing = ("next_ids", name) if target is None else (name, "next_ids")
            raise _invalid(
                f"{given} are given and {missing} are not; give both or neither",
                given=given,
                missing=missing,
            )
        types = _OUT_TYPES.get(name, (want.dtype,))
        if target.shape != want.shape or target.dtype not in types:
            raise _invalid(
                f"out.{name} is {_name(target.dtype)} {tuple(target.shape)}, and should be "
                f"{' or '.join(map(_name, types))} {tuple(want.shape)}",
                tensor=name,
                shape=str(tuple(target.shape)),
                wanted=str(tuple(want.shape)),
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _invalid(message: str, **facts: Fact) -> PayloadInvalidError:
    return PayloadInvalidError(message, facts=facts)
