"""Checks of ``select_top_k``'s arguments: every refusal it can make, with its numbers."""

from __future__ import annotations

import math
import reprlib
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.payload import MAX_TEMPERATURES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from teacher_logits.errors import Fact

LOGIT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_OUT_TYPES = {"topk_logprobs": LOGIT_TYPES, "topk_logits": (torch.float32, torch.bfloat16)}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def check_logits(logits: torch.Tensor, vocab_size: int | None) -> int:
    """Return how many columns of ``logits`` are vocabulary and not padding."""
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
    if not 1 <= vocab_size <= shape[-1]:
        raise _invalid(
            f"vocab_size is {vocab_size} and the logits have {shape[-1]} columns; it counts "
            f"those that are no padding, from 1 to {shape[-1]}",
            vocab_size=vocab_size,
            columns=shape[-1],
        )
    return vocab_size


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
    if k < 1:
        raise _invalid(f"k is {k}; at least 1 entry a position is kept", k=k)
    given = ", ".join(f"{t:g}" for t in temperatures)
    if not 1 <= len(temperatures) <= MAX_TEMPERATURES:
        raise _invalid(
            f"{len(temperatures)} temperatures are given ({given}); give 1.0 and at most "
            f"{MAX_TEMPERATURES - 1} others",
            temperature_count=len(temperatures),
            limit=MAX_TEMPERATURES,
        )
    for place, temperature in enumerate(temperatures):
        if not (math.isfinite(temperature) and temperature > 0):
            raise _invalid(
                f"temperature {place} is {temperature}; temperatures are finite and above 0",
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


def check_next_ids(next_ids: torch.Tensor, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return ``next_ids`` as int64 [P], beside the logits."""
    shape = tuple(logits.shape[:-1])
    positions = math.prod(shape)
    if next_ids.dtype not in _INTEGERS or tuple(next_ids.shape) not in (shape, (positions,)):
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
