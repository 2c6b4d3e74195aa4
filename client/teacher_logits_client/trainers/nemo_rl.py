"""Batches in NeMo RL's own keys: targets into them for its losses, and out of them for ours.

    input_ids [N,S], input_lengths [N], token_mask [N,S], sample_mask [N]
    teacher_topk_logits [N,S,K], teacher_topk_indices int64 [N,S,K]

Position s is what is said of token s+1, on both sides. NeMo RL's values are raw logits without
their normaliser; ours are log-probabilities, which differ by a constant a position, and its losses
take no notice of that. The mass outside the K ids is lost in its keys, so targets that are made
of them alone are renormalised on the K; with ``teacher_log_tail`` [N,S] beside them, which
``to_batch(..., with_tail=True)`` gives, they are the true ones.

Imports no NeMo RL; a ``BatchedDataDict`` is a mapping like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_size, is_whole
from teacher_logits_client.losses.fitting import check_temperature_above_zero
from teacher_logits_client.targets import ABSENT_LOGPROB, Targets
from teacher_logits_client.trainers.key_checks import (
    FLOATS,
    NUMBERS,
    WHOLE,
    check_array,
    check_learnable,
)
from teacher_logits_client.trainers.rectangles import (
    Rectangle,
    check_shapes,
    rectangle_of,
    targets_of_rectangle,
    tensor_of,
)

if TYPE_CHECKING:
    from teacher_logits_client.student import Session

__all__ = [
    "context_parallel_part",
    "get_topk_logits",
    "position_mask",
    "to_batch",
    "to_targets",
]

POSITIONS = "position_mask"
LOGITS = "teacher_topk_logits"
INDICES = "teacher_topk_indices"
TAIL = "teacher_log_tail"


def get_topk_logits(
    session: Session, data: Mapping[str, object], k: int, *, timeout: float | None = None
) -> dict[str, torch.Tensor]:
    """Return what NeMo RL's teacher policy returns under this name, from a served teacher.

    ``data`` has ``input_ids`` [N,S], padded on the right, and ``input_lengths`` [N]. The answer
    has ``topk_logits`` fp32 and ``topk_indices`` int64 [N,S,K], zeros behind a row's length.

    Raises:
        PayloadInvalidError: ``k`` is more than the session was opened with, or no whole number.
        TeacherLogitsError: whatever became of the request.
    """
    if not is_size(k):
        raise PayloadInvalidError(
            f"k is {k!r}: give a whole number from 1 on", facts={"k": repr(k)}
        )
    ids, lengths = (tensor_of(data, name) for name in ("input_ids", "input_lengths"))
    with session.score(ids, lengths=lengths, timeout=timeout).result() as payload:
        made = to_batch(payload.targets, width=ids.shape[1])
    has = made[LOGITS].shape[-1]
    if k > has:
        raise PayloadInvalidError(
            f"{k} entries a position are wanted, and the session was opened with {has}: open it "
            f"with StudentProfile(top_k={k})",
            facts={"wanted": k, "has": has},
        )
    return {"topk_logits": made[LOGITS][..., :k], "topk_indices": made[INDICES][..., :k]}


def to_batch(targets: Targets, *, width: int, with_tail: bool = False) -> dict[str, torch.Tensor]:
    """Return ``teacher_topk_logits`` and ``teacher_topk_indices`` of rows ``width`` tokens wide.

    The values are log-probabilities at the targets' temperature.

    Raises:
        PayloadInvalidError, LeaseLostError: see ``rectangles.rectangle_of``.
    """
    rectangle = rectangle_of(targets, width=width)
    made = {LOGITS: rectangle.logprobs, INDICES: rectangle.ids}
    return {**made, TAIL: rectangle.log_tail} if with_tail else made


def position_mask(batch: Mapping[str, object]) -> torch.Tensor:
    """Return which positions count, [N,S]: ``token_mask`` of the next token times ``sample_mask``.

    The sum is NeMo RL's count of valid tokens. Behind a row's length and at its last token
    nothing counts, whatever the masks say.

    Raises:
        PayloadInvalidError: a mask is missing, or none of its shape.
    """
    if not isinstance(batch, Mapping):
        raise PayloadInvalidError(
            f"the batch is a {type(batch).__name__}: give a mapping of keys to tensors",
            facts={"given": type(batch).__name__},
        )
    if POSITIONS in batch:
        given = tensor_of(batch, POSITIONS)
        check_array(POSITIONS, given, kind=NUMBERS, shape=(None, None))
        return given
    tokens, samples = (tensor_of(batch, name) for name in ("token_mask", "sample_mask"))
    check_array("token_mask", tokens, kind=NUMBERS, shape=(None, None))
    check_array("sample_mask", samples, kind=NUMBERS, shape=(len(tokens),))
    mask = torch.zeros_like(tokens)
    mask[:, :-1] = tokens[:, 1:]
    mask = mask * samples.unsqueeze(1).to(mask.device)
    if "input_lengths" in batch:
        lengths = tensor_of(batch, "input_lengths").to(mask.device)
        check_array("input_lengths", lengths, kind=WHOLE, shape=(len(mask),))
        places = torch.arange(mask.shape[1], device=mask.device)
        mask = mask * (places < lengths.unsqueeze(1) - 1).to(mask.dtype)
    return mask


def to_targets(batch: Mapping[str, object], *, temperature: float = 1.0) -> Targets:
    """Return the targets of a batch, for our losses over its logits [N,S,V].

    Raw logits are divided by ``temperature`` and renormalised on the K ids. Where
    ``teacher_log_tail`` is there, the values have to be log-probabilities at that temperature.
    A value of -inf becomes the log-probability of what is absent.

    Raises:
        PayloadInvalidError: a key is missing, shapes disagree with those of the masks, or a
            position that counts has a NaN, +inf, no finite value, or an id that is none.
    """
    positions = position_mask(batch)
    shape = tuple(positions.shape)
    check_temperature_above_zero(temperature)
    check_shapes(batch, shape, LOGITS, INDICES, TAIL, "input_ids")
    values, ids = tensor_of(batch, LOGITS), tensor_of(batch, INDICES)
    check_array(LOGITS, values, kind=FLOATS, shape=(*shape, None))
    check_array(INDICES, ids, kind=WHOLE, shape=(*shape, None))
    values, ids, positions = values.float(), ids.to(values.device), positions.to(values.device)
    if values.shape != ids.shape:
        raise PayloadInvalidError(
            f"{LOGITS} has shape {tuple(values.shape)} and {INDICES} {tuple(ids.shape)}: every "
            "value has its id",
            facts={"values": str(tuple(values.shape)), "ids": str(tuple(ids.shape))},
        )
    if TAIL in batch:
        tail = tensor_of(batch, TAIL)
        check_array(TAIL, tail, kind=FLOATS, shape=shape)
        tail = tail.to(values)
        check_learnable(positions, values, ids, tail)
    else:
        check_learnable(positions, values, ids, None)
        values = (values / temperature).log_softmax(-1)
        tail = values.new_full(shape, ABSENT_LOGPROB, dtype=torch.float32)
    floor = ABSENT_LOGPROB
    rectangle = Rectangle(ids=ids, logprobs=values.clamp_min(floor), log_tail=tail.clamp_min(floor))
    return targets_of_rectangle(rectangle, positions, temperature=temperature)


def context_parallel_part(
    batch: Mapping[str, object], *, size: int, rank: int
) -> dict[str, torch.Tensor]:
    """Return a context-parallel rank's columns of a batch, and its ``position_mask``.

    The layout is that of Megatron and NeMo RL: 2 ``size`` equal chunks of a row, of which rank r
    owns the r-th from the front and the r-th from the back. The mask is made of whole rows
    first: a chunk's last position is learnt from the first token of the next. The parts' counts
    add up to the whole's, so reduce over context parallel as over data parallel.

    Raises:
        PayloadInvalidError: the width is no multiple of 2 ``size``, or there is no such rank.
    """
    positions = position_mask(batch)
    width = positions.shape[1]
    fits = is_size(size) and is_whole(rank) and 0 <= rank < size
    if not fits or width % (2 * size):
        raise PayloadInvalidError(
            f"rank {rank!r} of {size!r} context-parallel ranks is to have its part of rows {width} "
            f"tokens wide: they are cut into two equal chunks a rank, so pad them to a multiple",
            facts={"rank": repr(rank), "size": repr(size), "width": width},
        )
    check_shapes(batch, tuple(positions.shape), "input_ids", LOGITS, INDICES, TAIL)
    chunk = width // (2 * size)
    starts = (rank * chunk, (2 * size - 1 - rank) * chunk)
    own = torch.cat([torch.arange(start, start + chunk) for start in starts])
    names = [each for each in ("input_ids", LOGITS, INDICES, TAIL) if each in batch]
    made = {name: tensor_of(batch, name) for name in names} | {POSITIONS: positions}
    return {name: each.index_select(1, own.to(each.device)) for name, each in made.items()}
