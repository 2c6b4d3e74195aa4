"""Sums over ranks: a collective of fixed length, which also says whether its ranks agree.

Every rank gives float64 values of the same number, an idle rank zeros. In front of them travel

    [ 1 | key, key² | key, key² | key, key² | values ... | 0 ... ]

with three keys of 11 bits, the CRC-32 of what the ranks have to agree on. Summed over n ranks,
n Σkey² = (Σkey)² exactly where all keys are the same, so all ranks find out at once, by the same
numbers. Exact below 2**53: up to 46,000 ranks. It has 256 numbers, 2 KiB, filled up with zeros: so
ranks whose losses have other numbers of bins meet in it as well, and hear of it, where vectors of
different lengths would end the process or leave them waiting. What has no room in it, of more than
some 120 bins, follows in one more, once all are known to have as much.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from teacher_logits.errors import RequestInvalidError
from teacher_logits_client.groups import check_group, usual_device

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEY_BITS = 11
_KEYS = 3
_ROOM = 256


class Reduction(Protocol):
    """Adds values up over ranks. ``GroupReduction`` is one; bring your own for another runtime."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of ``values``, float64 [n] on the CPU, n the same on each.

        n is 256, and does not change from step to step; of more than some 120 bins it is called
        once more with the rest. Called by every rank of a step, in the same order on each. Each
        rank gets the same bits. It may write into ``values``. What it raises aborts the step.
        """
        ...


class GroupReduction:
    """Adds up over a process group of torch.distributed: one all-reduce of float64.

    The group holds every rank that gives tokens of its own to the step: data parallel times
    context parallel. Ranks that compute the same tokens again (tensor parallel) are not in it,
    or they would count twice. Pipeline stages without the loss need the counts for their
    gradients all the same: give a group that spans the stages, in which they are idle ranks.

    ``group`` None is the world. ``device`` is where the values are reduced; left out, it is this
    process's CUDA device where the group has NCCL alone, and the CPU elsewhere. A rank that does
    not come is waited for as long as the group's own timeout says.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, device: torch.device | None = None
    ) -> None:
        self._group = group
        self._device = device

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the group.

        Raises:
            ConfigError: torch.distributed has no process group, or this rank is not in it.
        """
        check_group(self._group, "reduction")
        moved = values.to(self._device or usual_device(self._group))
        dist.all_reduce(moved, op=dist.ReduceOp.SUM, group=self._group)
        return moved.to(values.device)


def sum_over_ranks(
    values: Sequence[float], reduction: Reduction | None, *, agreed: str
) -> tuple[list[float], int]:
    """Return the values summed over ranks, and how many ranks gave some.

    ``agreed`` is what all ranks have to say alike, in words.

    Raises:
        RequestInvalidError: the ranks say different things, or the reduction changed the length.
    """
    whole = zlib.crc32(agreed.encode())
    keys = [float(whole >> _KEY_BITS * each & (1 << _KEY_BITS) - 1) for each in range(_KEYS)]
    head = [1.0, *(each for key in keys for each in (key, key * key))]
    given = [*head, *values]
    filling = [0.0] * (_ROOM - len(given))
    ranks, *rest = _reduced([*given[:_ROOM], *filling], reduction)
    pairs, sums = rest[: 2 * _KEYS], rest[2 * _KEYS :]
    if any(ranks * pairs[each + 1] != pairs[each] ** 2 for each in range(0, 2 * _KEYS, 2)):
        raise RequestInvalidError(
            f"the {ranks:.0f} ranks of this reduction do not reduce the same thing; here it is "
            f"{agreed}. Every rank begins the same step and attempt, with the same losses: abort "
            "the step on all of them",
            facts={"ranks": int(ranks), "here": agreed},
        )
    if len(given) > _ROOM:
        sums += _reduced(given[_ROOM:], reduction)
    return sums[: len(values)], int(ranks)


def _reduced(given: Sequence[float], reduction: Reduction | None) -> list[float]:
    """Return numbers summed over ranks, which all give as many."""
    values = torch.tensor(given, dtype=torch.float64)
    reduced = values if reduction is None else reduction.sum(values)
    if reduced.shape != (len(given),):
        raise RequestInvalidError(
            f"the reduction was given {len(given)} values and returned {reduced.numel()}; it "
            "returns as many as it is given",
            facts={"given": len(given), "returned": reduced.numel()},
        )
    found: list[float] = reduced.tolist()
    return found
