"""What a worker does as a student; a part of ``work.Work``."""

from __future__ import annotations

import gc
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tests.cuda.desk import PATIENCE_SECONDS, Desk, Facts, plain
from tests.cuda.scoring import Scoring, scoring_student
from tests.cuda.teaching import Teaching, bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import teacher_logits_client as tl


class Reading(Desk):
    """A student's sessions, and the steps and scores that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self._session: tl.Session | None = None
        self._other: tl.Session | None = None
        self._batches: dict[int, tl.Batch] = {}
        self.scores = Scoring()

    def open_session(
        self, teaching: Teaching, *, settings: Facts | None = None, **wishes: object
    ) -> Facts:
        """Be admitted as a student of one rank."""
        self.teaching = teaching
        self._other = self._session
        given: Facts = {"timeout": PATIENCE_SECONDS, **(settings or {})}
        self._session = self._stack.enter_context(
            self.client.open_session(teaching.student(**wishes), **given)  # type: ignore[arg-type]
        )
        return self.terms()

    def open_scoring(self, *, settings: Facts | None = None, **wishes: object) -> Facts:
        """Be admitted as a student of the server's own engine."""
        given: Facts = {"timeout": PATIENCE_SECONDS, **(settings or {})}
        profile = scoring_student(**wishes)
        self._session = self._stack.enter_context(
            self.client.open_session(profile, **given)  # type: ignore[arg-type]
        )
        return self.terms()

    def switch_session(self) -> None:
        """Go back to the session that was opened before this one, or on to it again."""
        assert self._session is not None
        self._session, self._other = self._other, self._session

    def terms(self) -> Facts:
        """Return what the session came to."""
        session = self.session
        return {
            "session_id": session.terms.session_id,
            "transport": session.transport.value if session.transport else None,
            "transports": {
                writer: transport.value if transport else None
                for writer, transport in session.transports.items()
            },
            "refusals": plain(session.refusals),
        }

    def close_session(self) -> None:
        """Close it."""
        self.session.close()

    @property
    def session(self) -> tl.Session:
        """The session."""
        assert self._session is not None
        return self._session

    # --- scores of the server's own engine ----------------------------------

    def score(self, rows: Sequence[Sequence[int]], name: str = "scored", **given: object) -> Facts:
        """Have rows scored and keep the lease; return how they came, and their bytes."""
        self.scores.score_rows(self.session, rows, name, **given)
        return self.scores.scored(name)

    def scored(self, name: str = "scored") -> Facts:
        """Return what the lease shows now."""
        return self.scores.scored(name)

    def close_scored(self, name: str = "scored") -> None:
        """Give it back."""
        self.scores.close_scored(name)

    # --- steps that are read and closed -------------------------------------

    def read(self, *steps: int) -> list[str]:
        """Read steps whole, hold each against the bits; return how their shards came."""
        return self.read_rows(range(self.teaching.rows), *steps)

    def read_rows(self, rows: Sequence[int], *steps: int) -> list[str]:
        """The same for some rows of a step, those of this rank."""
        came: set[str] = set()
        for step in steps:
            with self.acquire(step, rows) as batch:
                self.teaching.check(batch.columns, step, rows)
                assert bool(batch.targets.topk_logprobs.isfinite().all())
                came |= {each.value for each in batch.transports.values()}
        return sorted(came)

    def read_window(self, step: int, positions: int) -> None:
        """Read some first positions of a step's one row."""
        with self.session.acquire(step=step, timeout=PATIENCE_SECONDS) as batch:
            right = replace(self.teaching, row_tokens=(positions,)).right(step, [0])
            for name in ("topk_ids", "topk_logprobs", "logsumexp"):
                assert torch.equal(batch.columns[name], right[name]), name

    def acquire(self, step: int, rows: Sequence[int] = ()) -> tl.Batch:
        """Acquire a step; ``rows`` are this rank's, by default all."""
        rows = rows or range(self.teaching.rows)
        return self.session.acquire(
            step=step,
            input_ids=[self.teaching.tokens(step, row) for row in rows],
            windows=[self.teaching.window(step, row) for row in rows],
            timeout=PATIENCE_SECONDS,
        )

    def acquire_within(self, step: int, seconds: float) -> None:
        """Acquire a step before a deadline, and close it."""
        self.session.acquire(step=step, timeout=seconds).close()

    def _acquire_blindly(self, step: int) -> tl.Batch:
        return self.session.acquire(step=step, timeout=PATIENCE_SECONDS)

    # --- steps that are held ------------------------------------------------

    def hold(self, step: int, *, compare: bool = True) -> list[str]:
        """Acquire a step and keep its lease; without ``compare``, whatever is written there."""
        acquire = self.acquire if compare else self._acquire_blindly
        batch = self._batches[step] = acquire(step)
        return sorted({each.value for each in batch.transports.values()})

    def release(self, step: int) -> None:
        """Close a held step."""
        self._batches.pop(step).close()

    def check(self, step: int) -> None:
        """Hold the columns of a held step against the bits."""
        self.teaching.check(self._batches[step].columns, step)

    def row_status(self, step: int) -> list[int]:
        """Return the status of a held step's rows."""
        found: list[int] = self._batches[step].columns["row_status"].tolist()
        return found

    def raw(self, step: int) -> dict[str, bytes]:
        """Return the bytes of a held step's columns."""
        columns = self._batches[step].columns
        return {name: bits(column).numpy().tobytes() for name, column in columns.items()}

    def digest(self, step: int) -> str:
        """Return one digest over a held step's columns, names and bits."""
        columns = self._batches[step].columns
        found = hashlib.sha256()
        for name in sorted(columns):
            found.update(name.encode())
            found.update(bits(columns[name]).numpy().tobytes())
        return found.hexdigest()

    def spoil(self, step: int, name: str) -> None:
        """Write into a column of a held step, in place."""
        self._batches[step].columns[name].view(-1).view(torch.uint8).bitwise_not_()

    def keep(self, step: int, name: str) -> int:
        """Keep a view of a held step's column; return its address."""
        self._kept[name] = self._batches[step].columns[name]
        return self._kept[name].data_ptr()

    def check_kept(self, step: int, name: str) -> bool:
        """Say whether a kept view still shows what was written."""
        right = self.teaching.right(step, range(self.teaching.rows))[name]
        return torch.equal(self._kept[name], right)

    def drop(self, name: str) -> None:
        """Drop a kept view."""
        del self._kept[name]
        gc.collect()
