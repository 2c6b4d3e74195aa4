"""Uniforms by counter: numbers that are a function of what they are drawn for, and of nothing else.

u(seed, row, position, draw) is splitmix64 folded over the four, and its upper 53 bits
(docs/math.md, "Sampling"). A retry, another cut of the batch, another replica and another device
draw the same bits, so that a sample can be drawn again and nothing of it needs to be kept.

Seed and row enter as their sum: rows are to be told apart by more than a small number, as by their
digests.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FRACTION_BITS = 53


def uniforms(
    seed: int, rows: torch.Tensor, positions: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """Return uniforms in [0, 1), fp64, of the shape that the three int64 tensors broadcast to.

    ``seed`` is a whole number from 0 to 2**64 - 1. ``rows`` are taken as 64 bits each, such as
    the first of a row's digest.
    """
    state = torch.full((), _signed(seed), dtype=torch.int64, device=rows.device)
    for counter in (rows, positions, draws):
        state = _mixed(state + _signed(_GOLDEN) + counter)
    return _shifted(state, 64 - _FRACTION_BITS).double() * 2.0**-_FRACTION_BITS


def row_counters(digests: torch.Tensor) -> torch.Tensor:
    """Return what stands for each row in ``uniforms``, int64 [N], of row digests uint8 [N,16].

    Of the row's tokens, and so the same wherever else the row stands.
    """
    return digests.contiguous().view(torch.int64)[:, 0].clone()


def _mixed(state: torch.Tensor) -> torch.Tensor:
    # int64 wraps as the unsigned product does.
    state = (state ^ _shifted(state, 30)) * _signed(_FIRST)
    state = (state ^ _shifted(state, 27)) * _signed(_SECOND)
    return state ^ _shifted(state, 31)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, the sign as any other bit."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
