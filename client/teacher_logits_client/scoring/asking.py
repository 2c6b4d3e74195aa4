"""Scoring requests as they travel, and the size that a server takes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError, RequestInvalidError
from teacher_logits.grid import is_whole
from teacher_logits.keys import check_step
from teacher_logits.selection_rules import Sampled
from teacher_logits.tensors import to_bytes
from teacher_logits_client.calls.scoring import Scoring

if TYPE_CHECKING:
    from teacher_logits.selection_rules import SelectionRule
    from teacher_logits_client.rows import RowBatch
    from teacher_logits_client.rows.flat_rows import Rows


def scoring_of(batch: RowBatch, session_id: str, *, mask_bad_rows: bool) -> Scoring:
    """Return the request that has these rows scored; each time with a request id of its own."""
    return Scoring(
        session_id=session_id,
        request_id=secrets.token_hex(12),
        input_ids=batch.ids_bytes,
        row_lengths=batch.rows.lengths.tolist(),
        prefix_ids=batch.prefix_bytes,
        prefix_lengths=batch.prefix.lengths.tolist() if batch.prefix else (),
        row_windows=batch.windows.flatten().tolist() if batch.has_windows else (),
        mask_bad_rows=mask_bad_rows,
        ids=b"" if batch.chosen is None else to_bytes(batch.chosen),
        ids_per_position=0 if batch.chosen is None else batch.chosen.shape[1],
        seed=batch.seed,
    )


def check_bad_rows(policy: str) -> None:
    """Let a policy about bad rows pass.

    Raises:
        PayloadInvalidError: it is none.
    """
    if policy not in ("reject", "mask"):
        raise PayloadInvalidError(
            f"bad_rows={policy!r} is no policy: give 'reject' or 'mask'",
            facts={"bad_rows": str(policy)},
        )


def seed_of(seed: int | None, selection: SelectionRule | None) -> int | None:
    """Return the seed of a request's sample: its own or the session's, None of no sample.

    Raises:
        RequestInvalidError: it is no seed.
        PayloadInvalidError: the session's targets are no sample.
    """
    if isinstance(selection, Sampled):
        return selection.seed if seed is None else Sampled(seed=seed).seed
    if seed is not None:
        raise PayloadInvalidError(
            f"seed={seed} is given, and the session's targets are no sample: leave it out, or open "
            "the session with selection=Sampled()",
            facts={"seed": str(seed)},
        )
    return None


def check_acquired(step: object, payload_id: object) -> None:
    """Let a step, or a payload id, pass: one of them.

    Raises:
        RequestInvalidError: both are given or none, or the step is no whole number.
    """
    if (step is None) == (payload_id is None):
        raise RequestInvalidError(
            f"acquire was given step={step!r} and payload_id={payload_id!r}: give one of them",
            facts={"step": repr(step), "payload_id": repr(payload_id)},
        )
    if step is None:
        return
    if not is_whole(step):
        raise RequestInvalidError(
            f"step {step!r} is none: steps are whole numbers from 0 on", facts={"step": repr(step)}
        )
    check_step(step)


def check_count(input_ids: Rows, limit: int) -> None:
    """Refuse far too many rows before anything is made of them: each has a token at least.

    A list's tokens are counted as well; what is no list of rows is left to ``make_row_batch``.

    Raises:
        PayloadInvalidError: as ``check_size`` does.
    """
    shape = getattr(input_ids, "shape", None)
    try:
        least = sum(map(len, input_ids)) if shape is None else shape[0] * (len(shape) == 2)
    except (TypeError, IndexError):
        return
    if least > limit:
        raise _too_many(least if shape is None else f"at least {least}", limit)


def check_size(batch: RowBatch, limit: int) -> None:
    """Refuse more tokens than the server takes at a time, prefixes included.

    Raises:
        PayloadInvalidError: with both numbers.
    """
    if batch.token_count > limit:
        raise _too_many(batch.token_count, limit)


def _too_many(tokens: int | str, limit: int) -> PayloadInvalidError:
    return PayloadInvalidError(
        f"the request holds {tokens} tokens, and the server takes {limit} at a time: send fewer "
        "rows a request, or raise --max-request-tokens on the server",
        facts={"tokens": tokens, "limit": limit},
    )
