"""Scoring requests as they travel, and the size that a server takes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.calls import Scoring

if TYPE_CHECKING:
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
    )


def check_size(batch: RowBatch, limit: int) -> None:
    """Refuse more tokens than the server takes at a time, prefixes included.

    Raises:
        PayloadInvalidError: with both numbers.
    """
    if batch.token_count > limit:
        raise PayloadInvalidError(
            f"the request holds {batch.token_count} tokens, and the server takes {limit} at "
            "a time: send fewer rows a request, or raise --max-request-tokens on the server",
            facts={"tokens": batch.token_count, "limit": limit},
        )
