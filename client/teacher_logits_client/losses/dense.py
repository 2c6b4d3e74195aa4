"""Losses against dense teacher logits: every column of the vocabulary on both sides, streamed.

For a teacher whose logits are there in full: a draft head that learns from its own policy, a
full-vocabulary payload, a model in the same process. Sums and counts, one a bin where positions
have bins (passes, slots, teachers), as a ``StepLoss`` with ``bin_weights`` takes them.

Promises: positions that ``mask`` leaves out add exactly 0, whatever they hold; the logits are
only read; nothing of their size is made but the gradient, unless one tile holds them all.
``dense_soft_cross_entropy`` says what both take, return and refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_size
from teacher_logits_client.losses.dense_tiles import MAXIMA, DenseInputs, dense_loss
from teacher_logits_client.losses.fitting import check_temperature_above_zero
from teacher_logits_client.losses.positions import check_mask, weights_and_count
from teacher_logits_client.losses.sharding import check_columns, refused_together

if TYPE_CHECKING:
    from teacher_logits_client.losses.sharding import VocabShard

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def dense_soft_cross_entropy(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    bin_ids: torch.Tensor | None = None,
    bins: int = 1,
    temperature: float = 1.0,
    tile: int = 8192,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of -p log q over positions and the whole vocabulary, and their count.

    ``student_logits`` and ``teacher_logits`` [P,V] or [N,S,V] are raw, of one shape, on one
    device, floats of any type; position s of one meets position s of the other. The teacher is
    a constant: no gradient flows to it. ``mask`` [P] or [N,S] says which positions count; numbers
    weigh them. A row's last position has no next token: mask it.

    With ``bin_ids``, integers of the mask's shape from 0 to ``bins - 1``, sums and counts are
    [B], one a bin, not weighed: ``StepLoss(bin_weights=...)`` weighs them, and so may you. Bins
    of positions that do not count are not read. Without, they are scalars.

    Both sides are divided by ``temperature`` T, and the sum is multiplied by T². ``tile`` columns
    are taken at once, and as many rows as a cache holds of them. With ``shard``, both logits are
    this rank's columns of a vocabulary spread over a group: see ``VocabShard``.

    The sums are fp32 (fp64 where either side is). They are infinite where the teacher gives mass
    to what the student rules out by -inf; the gradient is finite even then. The counts are
    int64, or fp64 where ``mask`` has weights.

    Raises:
        PayloadInvalidError: shapes, types or devices that disagree, a bin that there is none of,
            a temperature that is not above 0; or, at a position that counts, a teacher that is
            NaN or +inf somewhere or -inf everywhere.
        ConfigError: ``shard`` is none.
        RequestInvalidError: the ranks of ``shard`` disagree, or one of them refused its part.
    """
    return _sums_and_counts(
        student_logits,
        teacher_logits,
        mask,
        bin_ids,
        bins=bins,
        settings=_Settings(temperature=temperature, tile=tile, less_entropy=False),
        shard=shard,
    )


def dense_forward_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    bin_ids: torch.Tensor | None = None,
    bins: int = 1,
    temperature: float = 1.0,
    tile: int = 8192,
    shard: VocabShard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of KL(teacher ‖ student) over positions and the whole vocabulary.

    Soft cross entropy less the teacher's entropy, which has no gradient: the two train alike,
    and this one is 0 where the student is the teacher. Where both are nearly so, it is the small
    difference of two large numbers. Everything else as ``dense_soft_cross_entropy``.

    Raises:
        PayloadInvalidError, ConfigError, RequestInvalidError: see there.
    """
    return _sums_and_counts(
        student_logits,
        teacher_logits,
        mask,
        bin_ids,
        bins=bins,
        settings=_Settings(temperature=temperature, tile=tile, less_entropy=True),
        shard=shard,
    )


@dataclass(frozen=True, kw_only=True)
class _Settings:
    temperature: float
    tile: int
    less_entropy: bool


def _sums_and_counts(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    mask: torch.Tensor | None,
    bin_ids: torch.Tensor | None,
    *,
    bins: int,
    settings: _Settings,
    shard: VocabShard | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    with refused_together(shard, student_logits, each=MAXIMA):
        check_temperature_above_zero(settings.temperature)
        _check_sizes(bins=bins, tile=settings.tile)
        _check_logits("student", student_logits)
        _check_logits("teacher", teacher_logits)
        _check_alike(student_logits, teacher_logits)
        if shard is not None:
            check_columns(student_logits.shape, shard)
        weights = _weights(mask, student_logits)
        of_bins = _bins(bin_ids, bins, weights, student_logits)
        columns = student_logits.shape[-1]
        inputs = DenseInputs(
            teacher=teacher_logits.detach().reshape(len(weights), columns),
            weights=weights,
            bins=of_bins,
            bin_count=bins,
            columns=columns if shard is None else shard.columns,
            tile=settings.tile,
            temperature=float(settings.temperature),
            less_entropy=settings.less_entropy,
            shard=shard,
        )
    sums = dense_loss(student_logits.reshape(len(weights), columns), inputs)
    counts = _counts(weights, of_bins, bins)
    return (sums[0], counts[0]) if bin_ids is None else (sums, counts)


def _weights(mask: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """Return each position's weight [P]."""
    everywhere = torch.ones(logits.shape[:-1].numel(), dtype=torch.bool, device=logits.device)
    check_mask(mask)
    if mask is not None:
        mask = _flat("the mask", mask, logits)
    weights, _ = weights_and_count(everywhere, mask)
    return weights


def _bins(
    bin_ids: torch.Tensor | None, bins: int, weights: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Return each position's bin, int64 [P]; those that count have one that there is.

    Raises:
        PayloadInvalidError: no ids for several bins, or ids of another shape, type or range.
    """
    if bin_ids is None:
        if bins == 1:
            return torch.zeros(len(weights), dtype=torch.int64, device=logits.device)
        raise PayloadInvalidError(
            f"{bins} bins and no bin_ids; give the bin of each position, 0 to {bins - 1}",
            facts={"bins": bins},
        )
    if not isinstance(bin_ids, torch.Tensor) or bin_ids.dtype not in _WHOLE:
        given = str(bin_ids.dtype) if isinstance(bin_ids, torch.Tensor) else type(bin_ids).__name__
        raise PayloadInvalidError(
            f"bin_ids is a {given}; give a tensor of whole numbers, one a position",
            facts={"given": given},
        )
    flat = _flat("bin_ids", bin_ids, logits).long()
    wrong = ((weights != 0) & ((flat < 0) | (flat >= bins))).nonzero()
    if len(wrong):
        position = int(wrong[0])
        raise PayloadInvalidError(
            f"bin_ids holds {int(flat[position])} at position {position} ({len(wrong)} such "
            f"positions count), and there {_so_many(bins)}",
            facts={
                "bin_id": int(flat[position]),
                "position": position,
                "wrong_positions": len(wrong),
                "bins": bins,
            },
        )
    return flat


def _so_many(bins: int) -> str:
    if bins == 1:
        return "is 1 bin, 0: say how many there are with bins="
    return f"are {bins} bins, 0 to {bins - 1}"


def _counts(weights: torch.Tensor, bins: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum of the weights of each bin [B]."""
    each = [torch.where(bins == number, weights, 0) for number in range(count)]
    dtype = torch.float64 if weights.is_floating_point() else torch.int64
    return torch.stack(each).sum(1, dtype=dtype)


def _flat(name: str, values: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return one number a position [P], on the device of the logits."""
    positions = logits.shape[:-1].numel()
    if values.shape != logits.shape[:-1] and tuple(values.shape) != (positions,):
        raise PayloadInvalidError(
            f"{name} has shape {tuple(values.shape)} and the logits {tuple(logits.shape)}; give "
            f"one number a position, {list(logits.shape[:-1])} or [{positions}]",
            facts={"given": str(tuple(values.shape)), "positions": positions},
        )
    return values.reshape(-1).to(logits.device)


def _check_logits(whose: str, logits: object) -> None:
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        given = str(logits.dtype) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise PayloadInvalidError(
            f"{whose} logits are a {given}: give a tensor of floats", facts={whose: given}
        )
    if logits.layout is not torch.strided or logits.dim() < 2:
        raise PayloadInvalidError(
            f"{whose} logits have shape {tuple(logits.shape)} ({logits.layout}): give dense ones, "
            "[P,V] or [N,S,V]",
            facts={whose: str(tuple(logits.shape))},
        )


def _check_alike(student: torch.Tensor, teacher: torch.Tensor) -> None:
    if student.shape != teacher.shape or student.device != teacher.device:
        raise PayloadInvalidError(
            f"student logits have shape {tuple(student.shape)} on {student.device} and the "
            f"teacher's {tuple(teacher.shape)} on {teacher.device}; they speak of the same "
            "positions and the same vocabulary, on one device",
            facts={"student": str(tuple(student.shape)), "teacher": str(tuple(teacher.shape))},
        )


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        if not is_size(size):
            raise PayloadInvalidError(
                f"{name} is {size!r}; give a whole number of at least 1", facts={name: repr(size)}
            )
