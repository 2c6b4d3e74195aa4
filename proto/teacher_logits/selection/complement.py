"""The complement: sums over everything in a row of logits but a few named ids.

Tails are computed here, on both sides, and never as 1 minus a sum: an fp32 ``1 - sum`` is off by
19 % at least at a tail of 1e-7 (docs/math.md, "Top-k and its normaliser").

Promises: the logits are only read; no buffer of the size of the logits, only of the few rows
that a cache holds, used over and over; the same bits for a row whatever rows come with it (on
a CPU). fp64 stays fp64, everything else is summed in fp32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Elements of the buffer: 5 MiB of fp32 stay in a CPU's cache, a GPU wants to be filled.
_CPU_ELEMENTS, _GPU_ELEMENTS = 5 << 18, 1 << 26
# torch's own numbers: elements below which it uses one thread, and two of its widest vectors.
_GRAIN, _VECTORS = 1 << 15, 32
_SUM_BLOCK = 1024
_LOG2_E = math.log2(math.e)


def complement_sums(
    rows: torch.Tensor,
    ids: torch.Tensor,
    *,
    temperatures: Sequence[float] = (1.0,),
    top: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum exp((logit - top) / temperature) over all of each row but ``ids``.

    ``rows`` [R,V] are logits, ``ids`` int64 [R,n], -1 for no id. ``top`` [R,1] is a number near
    the largest summand; it is looked for where it is not given. Returns ``top`` [R,1] (0 where
    nothing outside is finite) and the sums [R,T].
    """
    count, width = rows.shape
    dtype, device = computing_type(rows), rows.device
    sums = torch.zeros(count, len(temperatures), dtype=dtype, device=device)
    tops = torch.zeros(count, 1, dtype=dtype, device=device) if top is None else top
    padded = -(-width // _VECTORS) * _VECTORS
    step = _buffer_rows(count, padded, device)
    shifted = torch.empty(step, padded, dtype=dtype, device=device)
    powers = shifted if len(temperatures) == 1 else torch.empty_like(shifted)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        x, y = (b[: part.stop - start, :width] for b in (shifted, powers))
        if top is None:
            largest = without(x.copy_(rows[part]), ids[part]).amax(1, keepdim=True)
            tops[part] = largest.masked_fill_(largest == -torch.inf, 0.0)
            x.sub_(tops[part])
        else:
            without(x.copy_(rows[part]).sub_(top[part]), ids[part])
        for column, temperature in enumerate(temperatures):
            # Powers of two: torch computes them in a third of the time of exp.
            torch.mul(x, _LOG2_E / temperature, out=y)
            powers.exp2_()
            sums[part, column] = row_sums(y)
    return tops, sums


def without(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Set ``rows`` [R,V] to -inf at ``ids`` [R,n], in place. An id of -1 touches nothing."""
    lowered = torch.where(ids < 0, torch.inf, -torch.inf).to(rows.dtype)
    # A minimum, since a -1 is sent to column 0, which an id of the row may really be.
    rows.scatter_reduce_(1, ids.clamp_min(0), lowered, "amin")
    return rows


def row_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row [R], added up in the same order whatever R is.

    torch cuts a single long row among its threads; summing by blocks prevents that.
    """
    blocks = values.shape[1] // _SUM_BLOCK
    whole = values[:, : blocks * _SUM_BLOCK].unflatten(1, (blocks, _SUM_BLOCK))
    sums: torch.Tensor = whole.sum(2).sum(1)
    return sums + values[:, blocks * _SUM_BLOCK :].sum(1)


def computing_type(values: torch.Tensor) -> torch.dtype:
    """Return the type in which sums over these values are computed."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def rows_at_once(width: int, device: torch.device) -> int:
    """Return how many rows of ``width`` elements to work on together, in a buffer of their own."""
    return max(1, (_CPU_ELEMENTS if device.type == "cpu" else _GPU_ELEMENTS) // max(1, width))


def _buffer_rows(count: int, width: int, device: torch.device) -> int:
    """Return how many rows the buffer holds; on a CPU that may be more than there are.

    torch computes powers of the last few elements of a thread's share in another way, which
    differs in the last bit. So each thread's share is made whole rows of whole vectors.
    """
    if device.type != "cpu":
        return max(1, min(count, rows_at_once(width, device)))
    if count * width <= _GRAIN:
        return max(1, count)
    threads = torch.get_num_threads()
    return threads * max(-(-_GRAIN // width), rows_at_once(width * threads, device))
