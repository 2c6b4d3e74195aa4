"""A draft: a payload that its publisher writes, until it is sealed or abandoned.

    with publisher.reserve(step=7, input_ids=input_ids, lengths=lengths) as draft:
        select_top_k(logits, out=draft)

Leaving the block seals it, or abandons it where an error leaves with it. What is sealed is
immutable: views of it must not be written to any more. A draft that was not fully written is
refused, and so are rows with a NaN or +inf, unless they are to be masked; a refused draft is
abandoned, its step stays open, and its rows may be reserved again. ``check`` looks before the
seal, which then has nothing left to read. From the moment a seal goes out readers may read:
where no answer came, a draft can be sealed again or abandoned, and nothing else. A forked child
is refused.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits import tracing
from teacher_logits.errors import DeadlinePassedError, ServerUnreachableError, TeacherLogitsError
from teacher_logits_client.config import check_timeout
from teacher_logits_client.drafts.checks import finish
from teacher_logits_client.drafts.columns import DraftColumns, digest_of
from teacher_logits_client.drafts.writing import DraftWriting
from teacher_logits_client.dropped import warn_dropped
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.slabs.claims import (
    ABANDON_SECONDS,
    DraftStage,
    Sealing,
    abandon,
    lapsed,
)

if TYPE_CHECKING:
    from types import TracebackType

    from teacher_logits.payload import Payload
    from teacher_logits.payload_room import WriterRoom
    from teacher_logits_client.drafts.rows import DraftRows
    from teacher_logits_client.slabs.claims import Desk, Granted


class Draft(DraftWriting):
    """A payload being written. A context manager; ``Publisher.reserve`` makes one.

    One thread at a time writes and seals it; a publisher's drafts are independent.
    """

    _is_made = False  # until then its maker gives the room back

    def __init__(
        self,
        granted: Granted,
        *,
        payload: Payload,
        rows: DraftRows,
        micro_batch_size: int,
        mask_bad_rows: bool,
        desk: Desk,
        owner: object,
    ) -> None:
        """Take over granted room; ``Publisher``, its owner, does this and lives as long."""
        self._desk = desk
        tensors, temperatures = granted.room.tensors(payload.columns), len(payload.temperatures)
        columns = DraftColumns(
            tensors, rows, temperatures=temperatures, is_written=granted.is_written
        )
        super().__init__(payload, rows, columns, micro_batch_size=micro_batch_size)
        self.is_repeat = granted.reservation.is_repeat
        self._mask_bad_rows = mask_bad_rows
        self._owner = owner
        self._room: WriterRoom | None = granted.room
        self._rouse = granted.rouse
        #: Whether it was given up, by whichever thread; a seal may be under way on another.
        self._is_given_up = False
        #: What its seal says, as of its last check.
        self._sealing: Sealing | None = None
        self._is_made = True

    def check(self) -> None:
        """Look at all that was written, so that ``seal`` need not, while readers wait for it.

        From here on nobody may write through views that were taken before; what is written by
        ``select``, ``write`` or views taken later is looked at anew. What ``select_top_k`` wrote
        into a draft or its parts was looked at then, and costs nothing here.

        Raises:
            PayloadInvalidError: as for ``seal``; the draft stays open, and may be written anew.
        """
        self._check_open()
        self._look()

    def seal(self, *, timeout: float | None = None) -> None:
        """Check it, if that was not done, and have it read from now on; again is fine.

        Where the server did not answer in time it may be sealed all the same: call again to
        know, or abandon it.

        Raises:
            PayloadInvalidError: it was not fully written, holds bad rows, or values that cannot
                be. The draft is abandoned.
            PayloadConflictError: its rows were sealed before, with other bytes.
            ReservationLapsedError: it was abandoned, by another thread meanwhile perhaps, or its
                step was retired.
            DeadlinePassedError: the server did not answer.
        """
        if self._stage is DraftStage.SEALED:
            return
        if self._rouse is not None:
            self._rouse()  # readers wake while the rest is seen to
        self._check_held()
        if self._desk.way.line is None:  # else its end is seen by the seal itself
            self._desk.check()
        default = self._desk.default_seconds
        seconds = default if timeout is None else check_timeout(timeout, what="seal")
        until = time.monotonic() + seconds
        try:
            sealing = self._look()
        except Exception:  # after an interrupt it may be sealed still
            self.abandon()
            raise
        if self._is_given_up:
            raise lapsed(DraftStage.ABANDONED, payload_id=self.payload_id, step=self.step)
        # Before anything is sent, and whatever interrupts it: readers may be let in from here on.
        self._stage = DraftStage.DOUBTFUL
        try:
            with tracing.span("seal", {"step": self.step}):
                self._desk.way.seal(self.payload.payload_id, sealing, until=until)
            # Whoever closes a publisher abandons what another thread may be sealing just now: the
            # server knows which of the two it heard first.
            if self._is_given_up and not self._desk.way.abandon(self.payload_id, until=until):
                raise lapsed(DraftStage.ABANDONED, payload_id=self.payload_id, step=self.step)
        except (DeadlinePassedError, ServerUnreachableError):
            self._desk.check()  # where the session has ended, that is the better thing to say
            raise
        except TeacherLogitsError:
            self._end(DraftStage.ABANDONED)
            self._desk.later(partial(abandon, self._desk.way, self.payload_id))
            raise
        self._end(DraftStage.SEALED)

    def abandon(self, *, timeout: float | None = None) -> None:
        """Give it up: its rows may be reserved again. After its end, nothing happens.

        A server that cannot be told is told later, or learns it with the session's end. What was
        sealed, by a seal that was not answered, stays so: its ``stage`` says it.
        """
        if self._stage in (DraftStage.SEALED, DraftStage.ABANDONED) or not self._desk.is_here():
            return
        seconds = ABANDON_SECONDS if timeout is None else check_timeout(timeout, what="abandon")
        self._is_given_up = True
        try:
            self._end(DraftStage.ABANDONED)
            if self._desk.way.abandon(self.payload_id, until=time.monotonic() + seconds):
                self._stage = DraftStage.SEALED
        except BaseException as error:
            self._desk.later(partial(abandon, self._desk.way, self.payload_id))
            if not isinstance(error, TeacherLogitsError):
                raise

    def __enter__(self) -> Draft:
        self._desk.check()
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abandon()
        elif self._stage is not DraftStage.ABANDONED:  # by its owner, in the block
            self.seal()

    def __del__(self) -> None:
        if not self._is_made or not self._desk.is_here():
            return
        if self._stage not in (DraftStage.OPEN, DraftStage.DOUBTFUL):
            return
        self._stage = DraftStage.ABANDONED
        self._desk.later(partial(abandon, self._desk.way, self.payload_id))
        what = f"the draft of step {self.step} (payload {self.payload_id})"
        warn_dropped(what, self, ended="sealed or abandoned")

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a draft")

    def __repr__(self) -> str:
        return (
            f"<Draft of step {self.step}, rows {self.rows.start} to {self.rows.stop - 1} "
            f"({self.stage})>"
        )

    def _look(self) -> Sealing:
        """Return what its seal says, looked at anew where something was written since."""
        columns, room = self._columns, self._room
        if columns is None or room is None:  # another thread has abandoned it just now
            raise lapsed(DraftStage.ABANDONED, payload_id=self.payload_id, step=self.step)
        if self._sealing is None or columns.bad_row_count is None:
            bad = finish(columns, self._rows, self.payload, mask=self._mask_bad_rows)
            room.settle()
            self._sealing = Sealing(
                columns=self.payload.columns,
                bad_row_count=bad,
                valid_count=self._rows.valid_count,
                digest=digest_of(self.payload, room) if self.is_repeat else "",
            )
        return self._sealing

    def _end(self, stage: DraftStage) -> None:
        self._stage = stage
        self._columns = self._room = None
