"""Scoring requests as they travel, and the size that a server takes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.tensors import to_bytes
from teacher_logits_client.calls import Scoring

if TYPE_CHECKING:
    from teacher_logits_client.flat_rows import Rows
    from teacher_logits_client.rows import RowBatch


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
