"""A vocabulary in shards: the columns of the student's logits are spread over a group of ranks.

Two all-reduces in forward and none in backward (docs/math.md, "A vocabulary in shards"). The first
takes maxima of

    [ refused | key, -key | key, -key | one number or two a position ... | -inf ... ]

in fp32, always 256 KiB, so that ranks which disagree meet in it all the same (lengths that differ
would end the process under gloo, and hang elsewhere): the keys are the two halves of the CRC-32 of
what they have to say alike, and a rank that refuses its own part says so there, where the others
wait for it. What has no room in it, of more than 65,531 numbers, follows in one more reduction,
once all are known to have as much. Maxima only keep exponents small: fp32 is as good as any type,
as long as it is the same for all. The last reduction adds up sums.

Promises the same loss on every rank to the last bit; and that what one rank refuses is refused
by all, at once, before the second. Refuses shards that do not tile the vocabulary.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from teacher_logits.errors import ConfigError, PayloadInvalidError, RequestInvalidError
from teacher_logits_client.groups import check_group, usual_device
from teacher_logits_client.losses.head_logits import HeadLogits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HEAD = 5
_KEY_BITS = 16
_ROOM = (1 << 16) - _HEAD
_REFUSED = (-1, -1)
_WHOLE_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIDE = 0x1E3779B97F4A7C15  # Odd, so that no bit is lost by it.


class VocabShard:
    """The columns ``begin`` to ``end`` of the vocabulary, which this rank's logits hold.

        shard = tl.losses.VocabShard(rank * size, (rank + 1) * size, group=tensor_parallel_group)
        loss_sum, count = tl.losses.forward_kl(local_logits, targets, mask, shard=shard)

    Made once, by every rank of ``group`` (None is the world) at the same time: they tell each
    other their shards. These tile the vocabulary; they may be of different sizes, lie in any
    order of ranks, and one may be empty. ``end`` is that of real ids: what pads a shard's logits
    behind its own columns is never read, and has gradient 0. Logits as wide as the whole
    vocabulary are taken for logits that were not cut, and refused.

    Every rank then calls each loss at the same time, with the same targets, mask and settings and
    its own logits, and gets the same sum and count. Targets and weights are the same to the last
    bit, or all ranks are refused. Call ``backward`` on each: it reduces nothing, and
    leaves each rank the gradient of its own columns, complete. What the logits came from is
    reduced as in any column-parallel layer.

    Raises:
        ConfigError: no process group, bounds that are none, or shards that do not tile.
    """

    def __init__(self, begin: int, end: int, *, group: dist.ProcessGroup | None = None) -> None:
        check_group(group, "a vocabulary shard")
        self.begin = begin
        self.end = end
        self._group = group
        self._rank = dist.get_rank(group)
        self.vocabulary_size = self._exchanged()

    def __repr__(self) -> str:
        """Which columns, of how many, on which rank."""
        where = f"{self.begin} to {self.end} of {self.vocabulary_size}"
        return f"<{type(self).__name__} columns {where}, rank {self._rank}>"

    @property
    def columns(self) -> int:
        """How many columns are this rank's own."""
        return self.end - self.begin

    def own_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which column of this rank's each id is, -1 where it has none."""
        return torch.where((ids >= self.begin) & (ids < self.end), ids - self.begin, -1)

    def maxima(self, values: torch.Tensor, *, agreed: str) -> torch.Tensor:
        """Return the largest of each value [n] over the ranks, in their type and rounded to fp32.

        ``agreed`` is what all have to say alike, in words, and n follows from it.

        Raises:
            RequestInvalidError: another rank refused its part, or they say different things.
        """
        whole = zlib.crc32(agreed.encode())
        keys = [float(each) for each in divmod(whole, 1 << _KEY_BITS)]
        head = [0.0, *(each for key in keys for each in (key, -key))]
        reduced = self._reduced(head, values[:_ROOM])
        refusing, *pairs = reduced[:_HEAD].tolist()
        if refusing:
            raise RequestInvalidError(
                f"rank {refusing - 1:.0f} of the vocabulary's shards refused its part of this loss "
                "for a reason of its own, which it raised there",
                facts={"rank": self._rank, "refused_by": int(refusing) - 1},
            )
        if pairs[0] != -pairs[1] or pairs[2] != -pairs[3]:
            raise RequestInvalidError(
                f"the ranks of the vocabulary's shards compute different losses; on rank "
                f"{self._rank} it is {agreed}. Each rank has the same targets, mask and settings, "
                "and logits of one type",
                facts={"rank": self._rank, "here": agreed},
            )
        found = [reduced[_HEAD : _HEAD + len(values)]]
        if len(values) > _ROOM:
            rest = values[_ROOM:].float()
            dist.all_reduce(rest, op=dist.ReduceOp.MAX, group=self._group)
            found.append(rest)
        return torch.cat(found).to(values.dtype)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return each value summed over the ranks; ``values`` is written into."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self._group)
        return values

    def refuse(self, device: torch.device | None) -> None:
        """Say to the ranks that wait in ``maxima`` that this one has no part in it."""
        none = torch.empty(0, dtype=torch.float32, device=device or usual_device(self._group))
        self._reduced([self._rank + 1.0], none)

    def _reduced(self, head: list[float], values: torch.Tensor) -> torch.Tensor:
        given = values.new_full((_HEAD + _ROOM,), -torch.inf, dtype=torch.float32)
        given[: len(head)] = given.new_tensor(head)
        given[_HEAD : _HEAD + len(values)] = values
        dist.all_reduce(given, op=dist.ReduceOp.MAX, group=self._group)
        return given

    def _exchanged(self) -> int:
        """Tell the others this shard, and return the size of the vocabulary that all tile."""
        sizes = (self.begin, self.end)
        fits = all(type(each) is int for each in sizes) and 0 <= sizes[0] <= sizes[1]
        device = usual_device(self._group)
        own = torch.tensor(sizes if fits else _REFUSED, dtype=torch.int64, device=device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, own, group=self._group)
        shards = [tuple(each.tolist()) for each in gathered]
        if not fits:
            raise ConfigError(
                f"a vocabulary shard from {self.begin!r} to {self.end!r}: give the first of its "
                "columns and the one behind its last, whole numbers from 0 on",
                facts={"begin": repr(self.begin), "end": repr(self.end)},
            )
        return _tiled(shards)


def _tiled(shards: list[tuple[int, ...]]) -> int:
    """Return where the shards of all ranks end, if they tile from 0 on."""
    reached = 0
    for begin, end in sorted(shards):
        if begin != reached:
            rank = shards.index((begin, end))
            what = "gave no shard" if begin < 0 else f"has the columns {begin} to {end}"
            raise ConfigError(
                f"vocabulary shards: rank {rank} {what}, and the others reach {reached}; the "
                f"{len(shards)} shards tile the vocabulary from 0 on, without gap or overlap",
                facts={"rank": rank, "begin": begin, "end": end, "reached": reached},
            )
        reached = end
    if not reached:
        raise ConfigError(f"vocabulary shards: all {len(shards)} of them are empty")
    return reached


@contextmanager
def refused_together(shard: object, student_logits: object) -> Iterator[None]:
    """Tell the other ranks where an error ends this rank's part before the first reduction."""
    if not (shard is None or isinstance(shard, VocabShard)):
        raise ConfigError(
            f"shard is a {type(shard).__name__}; give a VocabShard, made once by every rank",
            facts={"given": type(shard).__name__},
        )
    try:
        yield
    except Exception:
        if shard is not None:
            given = isinstance(student_logits, torch.Tensor | HeadLogits)
            shard.refuse(student_logits.device if given else None)  # type: ignore[attr-defined]
        raise


def checksums(*tensors: torch.Tensor) -> str:
    """Return a number of each tensor's bits and their order, where it lies: one wait for all."""
    found = []
    for each in tensors:
        kind = _WHOLE_OF[each.element_size()]
        bits = each.contiguous().view(-1).view(kind).to(torch.int64, copy=True)
        # Mixed one by one: bits of floats are so alike that plain sums of them cancel.
        bits += torch.arange(len(bits), device=bits.device) * _STRIDE
        for shift in (32, 29):
            bits ^= bits >> shift
            bits *= _STRIDE
        found.append(bits.sum())
    return " ".join(f"{each % (1 << 64):x}" for each in torch.stack(found).tolist())


def check_columns(shape: Sequence[int], shard: VocabShard) -> None:
    """Let logits of a shape pass that have all of the shard's columns, and padding behind them.

    Raises:
        PayloadInvalidError: they have fewer, or those of the whole vocabulary.
    """
    if shape[-1] == shard.vocabulary_size > shard.columns:
        raise PayloadInvalidError(
            f"logits of shape {tuple(shape)} have the {shape[-1]} columns of the whole vocabulary, "
            f"and this rank's shard has {shard.columns} of them, {shard.begin} to {shard.end}; "
            f"give logits[..., {shard.begin}:{shard.end}], or these rows of a head's weight and "
            "bias. If what is behind them is padding, cut that off",
            facts={
                "columns": shape[-1],
                "shard_columns": shard.columns,
                "vocabulary_size": shard.vocabulary_size,
            },
        )
    if shape[-1] < shard.columns:
        raise PayloadInvalidError(
            f"logits of shape {tuple(shape)} have {shape[-1]} columns, and this rank's shard has "
            f"{shard.columns}, {shard.begin} to {shard.end}; give the logits of that shard, padded "
            "behind or not",
            facts={"columns": shape[-1], "shard_columns": shard.columns},
        )
