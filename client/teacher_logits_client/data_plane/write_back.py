"""Writing back: what a worker's answer has to be, and what is said of it, in numbers alone.

One writer a replica writes what its rank computed. The answer is a mapping with exactly the
fields that were promised, each a tensor with a row for every sample id, in the form promised.
Tensors go into the store and nowhere else: what a worker returns to its driver is scalars, and a
tensor in such a reply is an error.

    payload bytes       as computed: rows x padded width x bytes a token
    valid-token bytes   sum over rows of min(max(length, 0), width) x bytes a token
    padding bytes       the difference
    write bytes         what went into the store
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.data_plane.jagged import flat_rows, pack_jagged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from teacher_logits_client.data_plane.fields import FieldSpec
    from teacher_logits_client.data_plane.row_meta import RowMeta


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """What one writer wrote; see the module for the rules. ``write_ms`` is its wall time."""

    rows: int
    payload_bytes: int
    valid_token_bytes: int
    padding_bytes: int
    write_bytes: int
    write_ms: float

    def scalars(self) -> dict[str, int | float]:
        """Return it as a worker's reply."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What all writers of a step wrote: sums, and the slowest writer's time.

    ``driver_avoided_bytes``: what would have gone to the driver and out again, twice the payload.
    """

    rows: int
    payload_bytes: int
    valid_token_bytes: int
    padding_bytes: int
    write_bytes: int
    write_ms_sum: float
    write_ms_max: float
    driver_avoided_bytes: int


def check_answer(answer: object, meta: RowMeta, specs: Sequence[FieldSpec]) -> None:
    """Let an answer pass that has the promised fields, of the rows' number and in their form.

    Raises:
        PayloadInvalidError: naming the field, and both numbers.
    """
    if not isinstance(answer, Mapping):
        raise PayloadInvalidError(
            f"the answer is a {type(answer).__name__}: give a mapping of "
            f"{', '.join(spec.name for spec in specs)} to tensors",
            facts={"given": type(answer).__name__},
        )
    promised, has = {spec.name for spec in specs}, set(answer)
    if promised != has:
        told = [f"lacks {', '.join(sorted(promised - has))}"] if promised - has else []
        told += [f"has {', '.join(map(str, sorted(has - promised)))}"] if has - promised else []
        raise PayloadInvalidError(
            f"the answer {' and '.join(told)}; promised were {', '.join(sorted(promised))}",
            facts={"missing": len(promised - has), "unknown": len(has - promised)},
        )
    for spec in specs:
        _check_field(answer[spec.name], spec, rows=len(meta))


def report_of(
    answer: Mapping[str, torch.Tensor],
    packed: Mapping[str, torch.Tensor],
    meta: RowMeta,
    specs: Sequence[FieldSpec],
) -> WriteReport:
    """Return the bytes of an answer and of what it was packed to; the time is not known yet."""
    payload = valid = 0
    for spec in specs:
        value = answer[spec.name]
        own = _bytes(value)
        payload += own
        if value.is_nested or not spec.token_aligned:
            valid += own  # no padding is in it
        else:
            width, a_token = value.shape[1], math.prod(value.shape[2:]) * value.element_size()
            valid += sum(min(max(n, 0), width) for n in meta.sequence_lengths) * a_token
    return WriteReport(
        rows=len(meta),
        payload_bytes=payload,
        valid_token_bytes=valid,
        padding_bytes=payload - valid,
        write_bytes=sum(map(_bytes, packed.values())),
        write_ms=0.0,
    )


def pack_answer(
    answer: Mapping[str, torch.Tensor],
    meta: RowMeta,
    specs: Sequence[FieldSpec],
    *,
    padded_to: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return a checked answer without its padding; see ``jagged.pack_jagged``."""
    aligned = {spec.name for spec in specs if spec.token_aligned}
    return pack_jagged(answer, meta.sequence_lengths, token_aligned=aligned, padded_to=padded_to)


def join_replies(replies: Iterable[Mapping[str, object] | None]) -> StepReport:
    """Return a step's report of its workers' replies; those who wrote nothing answer None.

    Raises:
        PayloadInvalidError: a reply holds a tensor, or anything else than a report's numbers.
    """
    made = [_checked_reply(reply) for reply in replies if reply is not None]
    sums = {
        name: sum(int(reply[name]) for reply in made)
        for name in ("rows", "payload_bytes", "valid_token_bytes", "padding_bytes", "write_bytes")
    }
    times = [float(reply["write_ms"]) for reply in made]
    return StepReport(
        **sums,
        write_ms_sum=sum(times),
        write_ms_max=max(times, default=0.0),
        driver_avoided_bytes=2 * sums["payload_bytes"],
    )


def _checked_reply(reply: Mapping[str, object]) -> dict[str, int | float]:
    numbers = {
        name: value
        for name, value in reply.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if numbers.keys() != reply.keys() or numbers.keys() != WriteReport.__dataclass_fields__.keys():
        told = ", ".join(f"{name} ({type(value).__name__})" for name, value in reply.items())
        raise PayloadInvalidError(
            f"a reply has {told or 'nothing'}: a worker returns the numbers of its WriteReport "
            "and no tensor, which would pass through the driver",
            facts={"reply": told},
        )
    return numbers


def _check_field(value: object, spec: FieldSpec, *, rows: int) -> None:
    if not isinstance(value, torch.Tensor):
        raise PayloadInvalidError(
            f"{spec.name} is a {type(value).__name__}: give a tensor",
            facts={"field": spec.name, "given": type(value).__name__},
        )
    axes = 2 if spec.token_aligned else 1  # in front of the spec's own shape
    has = len(value.unbind()) if value.is_nested else (len(value) if value.dim() else 0)
    if has != rows:
        raise PayloadInvalidError(
            f"{spec.name} has {has} rows and there are {rows} sample ids",
            facts={"field": spec.name, "rows": has, "sample_ids": rows},
        )
    shape = tuple(value.unbind()[0].shape)[axes - 1 :] if value.is_nested else value.shape[axes:]
    if tuple(shape) != spec.shape or value.dim() != axes + len(spec.shape):
        raise PayloadInvalidError(
            f"{spec.name} has the shape {tuple(shape)} behind its rows"
            f"{' and tokens' if spec.token_aligned else ''} and {spec.shape} was promised",
            facts={"field": spec.name, "shape": str(tuple(shape)), "promised": str(spec.shape)},
        )
    if value.dtype is not spec.element_type:
        raise PayloadInvalidError(
            f"{spec.name} is {value.dtype} and {spec.element_type} was promised: a store takes "
            "one type a field, and loses the row of another",
            facts={
                "field": spec.name,
                "type": str(value.dtype),
                "promised": str(spec.element_type),
            },
        )


def _bytes(value: torch.Tensor) -> int:
    flat = flat_rows(value) if value.is_nested else value
    return flat.numel() * value.element_size()
