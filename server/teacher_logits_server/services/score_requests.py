"""Scoring requests as they come over the wire, and the jobs that they ask for.

Refuses what is too long to be looked at, before it is looked at: more rows than a server takes
tokens, more ids of the client's choice than it takes for that many tokens.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

from teacher_logits import tracing
from teacher_logits.errors import PayloadInvalidError
from teacher_logits.selection_rules import MAX_IDS_PER_TOKEN
from teacher_logits.v1 import scoring_service_pb2 as messages
from teacher_logits.wire import enum_from_wire
from teacher_logits_server.engines.chosen_ids import ChosenIds
from teacher_logits_server.scorer import BadRows, ScoreJob

#: Requests of more rows are read and checked off the loop: each row costs microseconds there.
_ROWS_ON_LOOP = 1024
_ID_BYTES = 4


Asked: TypeAlias = "messages.ScoreRequest | messages.ScoredIdsRequest"


def is_short(request: Asked) -> bool:
    """Say whether the serving thread may read it; ids of a choice are sorted, and take time."""
    few = len(request.row_lengths) <= _ROWS_ON_LOOP
    return few and isinstance(request, messages.ScoreRequest)


def digest_of(request: Asked) -> bytes:
    """Return what tells one scoring request from another, its ids among the rest."""
    kind = request.DESCRIPTOR.name.encode()
    data = request.SerializeToString(deterministic=True)
    return hashlib.blake2b(kind + data, digest_size=16).digest()


def read_job(request: Asked, *, deadline: float, max_tokens: int) -> ScoreJob:
    """Return the job of a request; ``deadline`` is a time of the server's clock.

    Raises:
        PayloadInvalidError: it has more rows than ``max_tokens`` or too many ids, or its windows
            are no pairs.
        RequestInvalidError: it does not say what to do about bad rows.
    """
    windows = request.row_windows
    for field, count in (
        ("row_lengths", len(request.row_lengths)),
        ("prefix_lengths", len(request.prefix_lengths)),
        ("row_windows", len(windows) // 2),
    ):
        if count > max_tokens:
            raise PayloadInvalidError(
                f"{field} speaks of {count} rows, and the server takes {max_tokens} tokens at a "
                "time: send fewer rows a request",
                facts={"field": field, "entries": count, "limit": max_tokens},
            )
    if len(windows) % 2:
        raise PayloadInvalidError(
            f"row_windows has {len(windows)} numbers: give a first position and a count a row",
            facts={"entries": len(windows)},
        )
    return ScoreJob(
        session_id=request.session_id,
        request_id=request.request_id,
        input_ids=request.input_ids,
        row_lengths=tuple(request.row_lengths),
        prefix_ids=request.prefix_ids,
        prefix_lengths=tuple(request.prefix_lengths),
        row_windows=tuple(zip(windows[::2], windows[1::2], strict=True)),
        bad_rows=enum_from_wire(
            request.bad_rows, messages.BadRowPolicy, "BAD_ROW_POLICY_", BadRows, field="bad_rows"
        ),
        deadline=deadline,
        digest=digest_of(request),
        seed=_seed(request),
        chosen=_chosen(request, max_tokens * MAX_IDS_PER_TOKEN),
        trace=tracing.current(),
    )


def _seed(request: Asked) -> int | None:
    if isinstance(request, messages.ScoreRequest) and request.HasField("seed"):
        return request.seed
    return None


def _chosen(request: Asked, most: int) -> ChosenIds | None:
    if isinstance(request, messages.ScoreRequest):
        return None
    count = len(request.ids) // _ID_BYTES
    if count > most:
        raise PayloadInvalidError(
            f"{count} ids are to be scored, and the server takes {most} at a time "
            f"({MAX_IDS_PER_TOKEN} for each token of --max-request-tokens): send fewer rows a "
            "request, or fewer ids a position",
            facts={"ids": count, "limit": most},
        )
    return ChosenIds(data=request.ids, per_position=request.ids_per_position)
