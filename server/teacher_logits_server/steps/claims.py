"""Claims: what a publisher reserves of a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from teacher_logits.errors import PayloadConflictError, RequestInvalidError
from teacher_logits.shard_parts import UNDIVIDED, PartGrid


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a publisher reserves: rows of one step, for one shard.

    ``real_rows`` counts the step's rows that are no padding; ``grid`` says into how many shards
    the teacher divides the rows of a rank.
    """

    payload_id: str
    session_id: str
    request_id: str
    step: int
    shard: int
    rows: range
    real_rows: int
    grid: PartGrid = UNDIVIDED

    @property
    def rank(self) -> int:
        """The data-parallel rank whose rows these are."""
        return self.grid.rank_of(self.shard)

    def check_same(self, other: Claim) -> None:
        """Refuse a claim under this one's request id that is for other rows.

        Raises:
            RequestInvalidError: it is.
        """
        mine = (self.step, self.shard, self.rows, self.real_rows)
        if mine != (other.step, other.shard, other.rows, other.real_rows):
            raise RequestInvalidError(
                f"request id {self.request_id!r} has reserved {rows_text(self.rows)} of step "
                f"{self.step} already; take a fresh id for each reservation",
                facts={"request_id": self.request_id, "step": self.step},
            )


def rows_text(rows: range) -> str:
    """Return rows as messages name them."""
    return f"rows {rows.start} to {rows.stop - 1}"


def conflict(claim: Claim, why: str) -> PayloadConflictError:
    """Return the error of a claim that another one stands against."""
    return PayloadConflictError(
        f"shard {claim.grid.text_of(claim.shard)} cannot write {rows_text(claim.rows)}: step "
        f"{claim.step} {why}; each row of a step is written once, by one shard or by all that "
        "divide it",
        facts={
            "step": claim.step,
            "shard": claim.shard,
            "first_row": claim.rows.start,
            "row_count": len(claim.rows),
        },
    )
