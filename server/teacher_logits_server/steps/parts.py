"""Parts: what the publishers of a teacher write of one step, and how far it has come.

Pure. A step is cut into parts, one a shard; a part's life:

    reserve --> reserved --seal--> sealed --> retired with its step
                   |-- its writer died        `-- its writer died unread
                   |         `------------------------`--> lost --reserve--> reserved
                   `-- abandon --> nothing

A writer that dies while its part is leased leaves an orphan, which can be had until its last
lease comes back, and is lost then; the same rows written again take its place.

Where the ranks of a teacher divide rows (``shard_parts``), several parts are of the same ones,
and these count once all of them are there.

Promises: the parts of a step share rows as their teacher divides them and not otherwise, so that
it is complete once its sealed rows are as many as its real ones.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import ProducerLostError
from teacher_logits.shard_parts import UNDIVIDED
from teacher_logits_server.steps.claims import Claim, conflict, rows_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from teacher_logits.shard_parts import PartGrid


class Stage(enum.Enum):
    """Where a step stands."""

    OPEN = "open"
    COMPLETE = "complete"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A reader's place: one of those that read a rank's rows for a student."""

    student_id: str
    rank: int
    number: int


@dataclass(kw_only=True)
class Part:
    """One shard of a step. Only its tables change it."""

    claim: Claim
    #: Whether readers can be told where it will lie.
    is_announced: bool = False
    is_sealed: bool = False
    is_lost: bool = False
    is_orphan: bool = False
    valid_count: int | None = None
    digest: str = ""
    #: A second writing of the same rows under way, to be compared.
    repeat: Claim | None = None
    #: Second writings that were found to be the same: payload id, session id.
    repeated: set[tuple[str, str]] = field(default_factory=set)

    def announce(self, valid_count: int | None) -> bool:
        """Learn that its place is known, and its count; say whether readers can be told of it.

        They are told of no repeat, which may never take the place of the first.
        """
        if not self.is_sealed and self.repeat is None:
            self.is_announced, self.valid_count = True, valid_count
        return self.is_announced

    def was_taken(self, session_id: str, payload_id: str) -> bool:
        """Say whether a session has sealed this already, under this payload id."""
        claim = self.claim
        first = (claim.payload_id, claim.session_id) if self.is_sealed else None
        return (payload_id, session_id) in {first, *self.repeated}


@dataclass(kw_only=True)
class Step:
    """One step. Only its tables change it."""

    number: int
    real_rows: int
    parts: dict[int, Part] = field(default_factory=dict)
    #: Who has read it, by student.
    consumed: dict[str, set[Seat]] = field(default_factory=dict)

    @property
    def sealed(self) -> list[Part]:
        """The parts that can be read, in the order of their rows."""
        parts = [p for p in self.parts.values() if p.is_sealed and not p.is_lost]
        return sorted(parts, key=_place)

    @property
    def sealed_rows(self) -> int:
        """Rows that can be read."""
        return _whole_rows(self.sealed)

    @property
    def there(self) -> list[Part]:
        """The parts that can be read, or will be where they were announced to lie, in order."""
        parts = [
            p for p in self.parts.values() if (p.is_sealed or p.is_announced) and not p.is_lost
        ]
        return sorted(parts, key=_place)

    @property
    def is_announced(self) -> bool:
        """Whether all of it is there, and not all of that sealed."""
        return _whole_rows(self.there) == self.real_rows and self.stage is Stage.OPEN

    @property
    def claimed(self) -> list[int]:
        """The shards that are reserved or there to be read."""
        return [shard for shard, part in self.parts.items() if not part.is_lost]

    @property
    def claimed_rows(self) -> int:
        """Rows of these, those of a rank once."""
        claims = [self.parts[shard].claim for shard in self.claimed]
        return sum({claim.rank: len(claim.rows) for claim in claims}.values())

    @property
    def stage(self) -> Stage:
        """Where it stands."""
        if self.sealed_rows == self.real_rows:
            return Stage.COMPLETE
        return Stage.LOST if any(p.is_lost for p in self.parts.values()) else Stage.OPEN

    @property
    def is_written(self) -> bool:
        """Whether some of it is reserved or there to be read."""
        return bool(self.claimed)

    def lacking(self, shards: Iterable[int]) -> list[int]:
        """Return which of some shards are still to be reserved, and have rows left for them.

        Those that divide rows with a shard that is reserved have these rows.
        """
        claims = {shard: self.parts[shard].claim for shard in self.claimed}
        has_room = self.claimed_rows < self.real_rows
        ranks = {claim.rank for claim in claims.values()}
        grid = next((claim.grid for claim in claims.values()), UNDIVIDED)
        return [
            shard
            for shard in shards
            if shard not in claims and (has_room or grid.rank_of(shard) in ranks)
        ]

    def claims_of(self, session_id: str) -> Iterator[tuple[Claim, bool]]:
        """Yield what a session reserved of it, and whether that is sealed and still there."""
        for part in self.parts.values():
            if part.claim.session_id == session_id and not part.is_lost:
                yield part.claim, part.is_sealed
            if part.repeat is not None and part.repeat.session_id == session_id:
                yield part.repeat, False

    @property
    def global_count(self) -> int | None:
        """Positions that count, where every part brought a mask.

        Those that hold other ids at the same positions count the same ones.
        """
        there = [p for p in self.there if p.claim.shard % p.claim.grid.vocabulary_parts == 0]
        counts = [part.valid_count for part in there]
        return None if None in counts else sum(count or 0 for count in counts)

    def check_claim(self, claim: Claim) -> None:
        """Refuse rows that are another's, or this shard's own and not sealed.

        Raises:
            PayloadConflictError: they are, or the step has another count of real rows.
        """
        if self.is_written and self.real_rows != claim.real_rows:
            raise conflict(
                claim, f"has {self.real_rows} real rows, and this shard says {claim.real_rows}"
            )
        for shard, part in self.parts.items():
            theirs = part.claim.rows
            if shard == claim.shard or part.is_lost:
                continue
            is_sibling = part.claim.rank == claim.rank
            if theirs != claim.rows if is_sibling else _overlap(theirs, claim.rows):
                named = claim.grid.text_of(shard)
                raise conflict(claim, f"has {rows_text(theirs)} from shard {named} already")
        own = self.parts.get(claim.shard)
        if own is None or own.is_lost:
            return
        if own.claim.rows != claim.rows:
            raise conflict(claim, f"has {rows_text(own.claim.rows)} of this shard already")
        if not own.is_sealed or own.repeat is not None:
            raise conflict(claim, "has them reserved for this shard already")

    def check_count(self, part: Part, valid_count: int | None) -> None:
        """Refuse another count of positions than those have that hold other ids at the same ones.

        Raises:
            PayloadConflictError: naming both counts.
        """
        claim, width = part.claim, part.claim.grid.vocabulary_parts
        for shard, other in self.parts.items():
            is_beside = shard // width == claim.shard // width and shard != claim.shard
            is_known = other.is_sealed or other.is_announced
            if is_beside and is_known and not other.is_lost and other.valid_count != valid_count:
                raise conflict(
                    claim,
                    f"counts {other.valid_count} of their positions by the loss_mask of shard "
                    f"{claim.grid.text_of(shard)}, and this shard {valid_count}",
                )

    def lacking_text(self, shard_count: int, grid: PartGrid) -> str:
        """Say which shards of a step of ``shard_count`` shards are not there to be read."""
        sealed, claimed = {part.claim.shard for part in self.sealed}, set(self.claimed)
        written = [shard for shard in self.claimed if shard not in sealed]
        absent = [shard for shard in range(shard_count) if shard not in claimed]
        text = f"{self.sealed_rows} of its {self.real_rows} rows are sealed"
        for shards, what in ((written, "being written"), (absent, "not reserved")):
            if shards and self.sealed_rows < self.real_rows:
                more = " ..." if len(shards) > 8 else ""
                text += f"; {what}: shard {', '.join(map(grid.text_of, shards[:8]))}{more}"
        return text

    def lost_error(self) -> ProducerLostError:
        """Return the error of whoever wants a step that has lost a part."""
        lost = sorted(shard for shard, part in self.parts.items() if part.is_lost)
        shards = ", ".join(self.parts[shard].claim.grid.text_of(shard) for shard in lost)
        was_written = any(part.is_sealed for part in self.parts.values() if part.is_lost)
        before = "anybody had leased it" if was_written else "it was sealed"
        return ProducerLostError(
            f"step {self.number} lacks shard {shards}: its publisher ended before {before}; wait "
            "for a new publisher of that shard to write it again, or go on without this step",
            facts={"step": self.number, "shards": shards},
        )


def _place(part: Part) -> tuple[int, int]:
    return (part.claim.rows.start, part.claim.shard)


def _whole_rows(parts: Iterable[Part]) -> int:
    """Count the rows of which all parts are among these."""
    claims = [part.claim for part in parts]
    of_rank = Counter(claim.rank for claim in claims)
    whole = [claim for claim in claims if of_rank[claim.rank] == claim.grid.count]
    return sum({claim.rank: len(claim.rows) for claim in whole}.values())


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
