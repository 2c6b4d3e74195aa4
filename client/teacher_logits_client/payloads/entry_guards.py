"""Entry guards: what a payload's entries are held against where they are not the K best.

    entries   by the rule that was asked for, as many, and at its temperatures
    ids       those that the client chose, in its order
    values    sums to one, ranges, no NaN; see ``teacher_logits.selection.invariants``
    lookup    where the token that comes next is among the chosen ids, it has its log-probability

What fails raises, and the payload is not handed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.codec import entry_tolerance
from teacher_logits.errors import AlignmentError, PayloadInvalidError
from teacher_logits.layout import (
    SAMPLED_COLUMNS,
    SCORED_ID_COLUMNS,
    ColumnKind,
    RowStatus,
)
from teacher_logits.profiles import SCORED_COLUMNS
from teacher_logits.selection.invariants import check_invariants
from teacher_logits.selection_rules import TOP_K, ClientIds, Sampled
from teacher_logits.terms import Check, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from teacher_logits.payload import Payload
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.selection_rules import SelectionRule
    from teacher_logits_client.rows import RowBatch

    Columns = Mapping[ColumnKind, torch.Tensor]

_COLUMNS = {Sampled: SAMPLED_COLUMNS, ClientIds: SCORED_ID_COLUMNS}


def check_entries(payload: Payload, profile: StudentProfile, batch: RowBatch | None) -> None:
    """Refuse entries of another rule, number or temperature than was asked for.

    ``batch`` None, or without chosen ids, asks for what the session's profile says; another
    session's payload of chosen ids is what it says itself.

    Raises:
        PayloadInvalidError: with the numbers of both.
    """
    if payload.part is not None:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} holds a part of its rows ({payload.part.text}): acquire "
            "its step, which puts all of them together",
            facts={"payload_id": payload.payload_id, "part": payload.part.text},
        )
    has = payload.selection
    for kind in _COLUMNS.get(type(has), SCORED_COLUMNS):
        payload.column(kind)
    asked: SelectionRule = profile.selection or TOP_K
    top_k, temperatures = profile.top_k, profile.all_temperatures
    chosen = None if batch is None else batch.chosen
    if chosen is not None:
        asked, top_k = ClientIds(), chosen.shape[1]
    elif isinstance(has, ClientIds):
        asked, top_k, temperatures = has, payload.top_k, payload.temperatures
    elif isinstance(asked, Sampled) and isinstance(has, Sampled):
        seed = None if batch is None else batch.seed
        asked = has if seed is None else Sampled(seed=seed)
    same = len(temperatures) == len(payload.temperatures) and all(
        abs(wanted - got) <= 1e-6 * abs(wanted)  # they travel as fp32
        for wanted, got in zip(temperatures, payload.temperatures, strict=True)
    )
    if has != asked:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} has entries of {has}; the session asked for {asked}",
            facts={"selection": has.name, "asked_selection": asked.name},
        )
    if payload.top_k != top_k or not same:
        raise PayloadInvalidError(
            f"payload {payload.payload_id} has K = {payload.top_k} and temperatures "
            f"{payload.temperatures}; the session asked for K = {top_k} and {temperatures}",
            facts={"top_k": payload.top_k, "asked_top_k": top_k},
        )


def check_values(payload: Payload, columns: Columns, batch: RowBatch | None) -> None:
    """Hold the values of a sample, or of chosen ids, against what must be true of them.

    Raises:
        PayloadInvalidError: naming the first fault's row and position; or the ids are others than
            those of ``batch``.
    """
    if not isinstance(payload.selection, Sampled | ClientIds):
        return
    check_invariants(columns, vocab_size=payload.vocabulary_size, temperatures=payload.temperatures)
    chosen = None if batch is None else batch.chosen
    if chosen is None:
        return
    ids = columns[ColumnKind.SCORED_IDS]
    wrong = (ids != chosen.to(ids.device)).any(1) & _good(columns).to(ids.device)
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise PayloadInvalidError(
            f"position {position} of payload {payload.payload_id} has the ids "
            f"{ids[position].tolist()}, and {chosen[position].tolist()} were sent",
            facts={"position": position, "wrong_positions": int(wrong.sum())},
        )


def check_sample_lookup() -> Check:
    """Return the check of a sample, whose weights are no log-probabilities to look up."""
    return Check(
        name="lookup_identity",
        verdict=Verdict.UNCHECKED,
        detail="a sample has weights, and no log-probabilities that could be looked up",
    )


def check_chosen_lookup(columns: Columns, following: torch.Tensor) -> Check:
    """Refuse chosen entries that give the token that comes next something else than it has.

    ``following`` int64 [P], -1 where no token comes next.

    Raises:
        AlignmentError: naming the first position.
    """
    ids, values = columns[ColumnKind.SCORED_IDS], columns[ColumnKind.SCORED_LOGPROBS]
    actual = columns[ColumnKind.ACTUAL_LOGPROB]
    wanted = following.to(ids.device).masked_fill(~_good(columns).to(ids.device), -1)
    match = (ids == wanted.unsqueeze(1)) & (wanted >= 0).unsqueeze(1)
    found = match.any(1)
    place = match.int().argmax(1, keepdim=True)
    stored = values.gather(1, place)
    gap = (stored.squeeze(1) - actual).nan_to_num(nan=0.0).abs()  # -inf and -inf agree
    wrong = (found & ~(gap <= entry_tolerance(stored).squeeze(1).nan_to_num(posinf=0.0))).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise AlignmentError(
            f"position {at}: the token that comes next is {int(wanted[at])}, its log-probability "
            f"is said to be {float(actual[at]):.4f}, and among the chosen ids it has "
            f"{float(stored[at]):.4f} ({len(wrong)} positions disagree)",
            facts={"position": at, "token_id": int(wanted[at]), "wrong_positions": len(wrong)},
        )
    count = int(found.sum())
    return Check(
        name="lookup_identity",
        verdict=Verdict.PASSED if count else Verdict.UNCHECKED,
        detail=f"the token that comes next is among the chosen ids at {count} positions",
    )


def _good(columns: Columns) -> torch.Tensor:
    """Return bool [P], on the host: the positions of rows that are OK."""
    good = columns[ColumnKind.ROW_STATUS] == RowStatus.OK
    return good.repeat_interleave(columns[ColumnKind.ROW_OFFSETS].diff())
