"""What a worker does that asks the server's own engine; a part of ``work.Work``."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from tests.cuda.teaching import bits

import teacher_logits_client as tl
from teacher_logits.layout import ElementType

if TYPE_CHECKING:
    from collections.abc import Sequence

Scored = dict[str, object]

TOP_K = 7


class Scoring:
    """Scores that a worker has asked for, by their names."""

    def __init__(self) -> None:
        self._scored: dict[str, tl.LeasedPayload] = {}

    def score_rows(
        self, session: tl.Session, rows: Sequence[Sequence[int]], name: str, **given: object
    ) -> None:
        """Have rows scored, and keep the lease."""
        future = session.score([list(row) for row in rows], **given)  # type: ignore[arg-type]
        self._scored[name] = future.result()

    def scored(self, name: str = "scored") -> Scored:
        """Return how scores came, and their bytes."""
        payload = self._scored[name]
        return {
            "transport": payload.transport.value,
            "columns": {
                kind: bits(column).numpy().tobytes() for kind, column in payload.columns.items()
            },
        }

    def close_scored(self, name: str = "scored") -> None:
        """Give a lease back."""
        self._scored.pop(name).close()
        gc.collect()

    def close_all_scored(self) -> None:
        """Give all of them back."""
        for name in list(self._scored):
            self.close_scored(name)


def scoring_student(**wishes: object) -> tl.StudentProfile:
    """Return what a student of the engine says of itself."""
    given: dict[str, object] = {
        "batch_grid": tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1),
        "top_k": TOP_K,
        **wishes,
    }
    if "value_type" in given:
        given["value_type"] = ElementType(given["value_type"])
    return tl.StudentProfile(**given)  # type: ignore[arg-type]
