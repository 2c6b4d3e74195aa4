"""The student worker's side: a payload's tensors into the batch that its loss takes.

    attach(batch, payload, step=step, rows=rows)     # payload: the worker's own argument

The keys are NeMo RL's, as in ``trainers.nemo_rl``: ``teacher_topk_logits`` and
``teacher_topk_indices`` [N,S,K] beside ``input_ids`` [N,S].

Promises: nothing is attached that is not of these rows, this length, this K, these types, this
vocabulary and this step. What is None is not checked; the batch's own rows and length always are.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.ray.descriptions import (
    INDICES,
    LOGITS,
    Expected,
    check_description,
)
from teacher_logits_client.ray.flat import check_top_k
from teacher_logits_client.ray.given import check_sizes_given, whole_numbers
from teacher_logits_client.ray.opening import open_payload
from teacher_logits_client.ray.row_tokens import check_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_client.ray.flat import FlatPayload

KEYS = {LOGITS: "teacher_topk_logits", INDICES: "teacher_topk_indices"}


def attach(
    batch: MutableMapping[str, object],
    payload: object,
    *,
    step: int | None = None,
    rows: Sequence[int] | None = None,
    top_k: int | None = None,
    vocabulary_size: int | None = None,
    copy: bool = False,
    out: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Put a payload's tensors under the trainer's keys; None is no payload, and changes nothing.

    By default they view memory that is not this worker's alone, in the object store or in a slab:
    not to be written into (``flat``). ``copy`` makes them its own; ``out`` has tensors
    ``topk_logits`` and ``topk_indices`` to be filled, of any type and device, pinned or not. Ids
    that came packed as int32 are widened to int64, which ``torch.gather`` takes, but for ``out``.

    The batch has ``input_ids`` [N,S]; where the payload has its rows' digests, tokens are compared,
    and lengths with ``input_lengths`` [N] if the batch has that.

    Raises:
        PayloadInvalidError: the batch has such tensors already, or the payload is not what is
            expected; the message says in what, with both numbers.
        AlignmentError: a row is of other tokens.
        SlabOpenError, PayloadRetiredError: see ``slab_reading``.
    """
    if payload is None:
        return
    _check_batch(batch)
    there = sorted(key for key in KEYS.values() if key in batch)
    if there:
        raise PayloadInvalidError(
            f"the batch has {there} already: a step takes one way or the other",
            facts={"present": str(there)},
        )
    flat = open_payload(payload)
    tokens = _tensor(batch, "input_ids", axes=2)
    lengths = _lengths(batch, rows=len(tokens))
    check_sizes_given(top_k=top_k, vocabulary_size=vocabulary_size)
    expected = Expected(
        step=step,
        rows=None if rows is None else whole_numbers(rows, what="rows"),
        row_count=tokens.shape[0],
        sequence_length=tokens.shape[1],
        top_k=top_k,
        vocabulary_size=vocabulary_size,
    )
    check_description(flat.description, expected)
    check_tokens(flat.description, tokens, lengths)
    tensors = flat.views()
    if flat.description.id_range is None:
        check_top_k(tensors, vocabulary_size=vocabulary_size)
    tensors = _as_wanted(flat, tensors, copy=copy, out=out)
    batch.update({KEYS[name]: each for name, each in tensors.items()})


def _as_wanted(
    flat: FlatPayload,
    views: dict[str, torch.Tensor],
    *,
    copy: bool,
    out: Mapping[str, torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    if out is not None:
        if not isinstance(out, Mapping):
            raise PayloadInvalidError(
                f"out is a {type(out).__name__}: give a mapping of {LOGITS} and {INDICES}",
                facts={"given": type(out).__name__},
            )
        return flat.copy_into(out)
    made = {name: view.clone() for name, view in views.items()} if copy else dict(views)
    made[INDICES] = made[INDICES].to(torch.int64)
    return made


def _check_batch(batch: object) -> None:
    if not isinstance(batch, MutableMapping):
        raise PayloadInvalidError(
            f"the batch is a {type(batch).__name__}: give the trainer's own mapping of keys to "
            "tensors, into which the payload's are put",
            facts={"given": type(batch).__name__},
        )


def _lengths(batch: Mapping[str, object], *, rows: int) -> torch.Tensor | None:
    if "input_lengths" not in batch:
        return None
    found = _tensor(batch, "input_lengths", axes=1)
    if len(whole_numbers(found, what="input_lengths")) != rows:
        raise PayloadInvalidError(
            f"the batch has {len(found)} input_lengths and {rows} rows of input_ids",
            facts={"lengths": len(found), "rows": rows},
        )
    return found


def _tensor(batch: Mapping[str, object], name: str, *, axes: int) -> torch.Tensor:
    found = batch.get(name)
    if not isinstance(found, torch.Tensor) or found.is_nested or found.dim() != axes:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise PayloadInvalidError(
            f"the batch's {name} is {shape}: give a padded tensor of {axes} axes, by which the "
            "payload's rows and length are checked",
            facts={"name": name, "has": str(shape)},
        )
    return found
