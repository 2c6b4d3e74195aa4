"""Scoring requests as they travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.v1 import scoring_service_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """A scoring request as it travels; see ``ScoreRequest`` for the fields.

    With ``ids``, those of the client's choice are scored; see ``ScoredIdsRequest``.
    """

    session_id: str
    request_id: str
    input_ids: bytes
    row_lengths: Sequence[int]
    prefix_ids: bytes
    prefix_lengths: Sequence[int]
    row_windows: Sequence[int]
    mask_bad_rows: bool
    ids: bytes = b""
    ids_per_position: int = 0
    seed: int | None = None

    def message(self) -> scoring_service_pb2.ScoreRequest:
        """Return the request for the session's own selection."""
        request = scoring_service_pb2.ScoreRequest(seed=self.seed)
        self._fill(request)
        return request

    def ids_message(self) -> scoring_service_pb2.ScoredIdsRequest:
        """Return the request for ids of the client's choice."""
        request = scoring_service_pb2.ScoredIdsRequest(
            ids=self.ids, ids_per_position=self.ids_per_position
        )
        self._fill(request)
        return request

    def _fill(
        self, request: scoring_service_pb2.ScoreRequest | scoring_service_pb2.ScoredIdsRequest
    ) -> None:
        request.session_id, request.request_id = self.session_id, self.request_id
        request.input_ids, request.prefix_ids = self.input_ids, self.prefix_ids
        request.row_lengths.extend(self.row_lengths)
        request.prefix_lengths.extend(self.prefix_lengths)
        request.row_windows.extend(self.row_windows)
        request.bad_rows = (
            scoring_service_pb2.BAD_ROW_POLICY_MASK
            if self.mask_bad_rows
            else scoring_service_pb2.BAD_ROW_POLICY_REJECT
        )
