"""Ids of a shard: a selection from the ids that a tensor-parallel rank holds.

Its log-probabilities, tail and normaliser are those within these ids, which are named by their
numbers in the whole vocabulary. ``actual_logprob`` is -inf where the token that comes next is
another rank's. Students merge the shards by their raw logits (``shard_merging``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.layout import ColumnKind as Kind
from teacher_logits.selection.rule_selection import select_into

if TYPE_CHECKING:
    from teacher_logits.payload import Payload
    from teacher_logits.selection import Selection
    from teacher_logits_client.drafts.columns import DraftColumns
    from teacher_logits_client.drafts.rows import DraftRows


def select_own(
    out: Selection, logits: torch.Tensor, *, payload: Payload, next_ids: torch.Tensor | None
) -> None:
    """Select from logits [...,V] of the ids that a payload holds, as ``select_into``.

    ``next_ids`` are the whole vocabulary's.

    Raises:
        PayloadInvalidError: as ``select_top_k``.
    """
    first, stop = _ids_of(payload)
    is_whole = stop - first == payload.vocabulary_size
    elsewhere = None
    if next_ids is not None and not is_whole:
        is_other = (next_ids < first) | (next_ids >= stop)
        elsewhere = is_other & (next_ids >= 0) & (next_ids < payload.vocabulary_size)
        next_ids = torch.where(elsewhere | (next_ids < 0), -1, next_ids - first)
    select_into(
        out,
        logits,
        rule=payload.selection,
        temperatures=payload.temperatures,
        vocab_size=stop - first,
        next_ids=next_ids,
    )
    if is_whole:
        return
    ids = out.topk_ids
    ids.add_(torch.where(ids >= 0, first, 0).to(ids.dtype))
    if elsewhere is not None and out.actual_logprob is not None:
        is_ok = out.status == 0
        out.actual_logprob.masked_fill_(elsewhere.to(is_ok.device) & is_ok, -torch.inf)


def check_own_ids(columns: DraftColumns, rows: DraftRows, payload: Payload) -> None:
    """Refuse what a teacher wrote by itself of ids that are not its rank's.

    Raises:
        PayloadInvalidError: an id that is another rank's, or an ``actual_logprob`` of one.
    """
    first, stop = _ids_of(payload)
    if stop - first == payload.vocabulary_size:
        return
    ids = columns.by_kind[Kind.TOPK_IDS]
    wrong = (((ids >= 0) & (ids < first)) | (ids >= stop)).nonzero()
    if len(wrong):
        found = int(ids[wrong[0, 0], wrong[0, 1]])
        raise PayloadInvalidError(
            f"topk_ids has {found} at position {int(wrong[0, 0])} of the shard, which holds the "
            f"ids {first} to {stop - 1}: give its own ids, by their numbers in the whole "
            "vocabulary",
            facts={"token_id": found, "first_id": first, "stop_id": stop},
        )
    actual = columns.by_kind.get(Kind.ACTUAL_LOGPROB)
    if actual is None or rows.next_ids is None:
        return
    following = rows.next_ids.to(actual.device)
    is_other = (following >= 0) & ((following < first) | (following >= stop))
    is_ok = columns.selection.status == 0
    wrong = (is_other & is_ok & (actual != -torch.inf)).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        raise PayloadInvalidError(
            f"actual_logprob is {float(actual[at]):g} at position {at} of the shard, where the "
            f"token that comes next is {int(following[at])} and the shard holds the ids {first} to "
            f"{stop - 1}: give -inf there, since the shard that holds the token says it",
            facts={"token_id": int(following[at]), "first_id": first, "stop_id": stop},
        )


def _ids_of(payload: Payload) -> tuple[int, int]:
    part = payload.part
    return (0, payload.vocabulary_size) if part is None else (part.first_id, part.stop_id)
