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
import warnings
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.errors import DeadlinePassedError, ServerUnreachableError, TeacherLogitsError
from teacher_logits_client.config import check_timeout
from teacher_logits_client.drafts.checks import finish
from teacher_logits_client.drafts.columns import DraftColumns, digest_of
from teacher_logits_client.drafts.parts import DraftPart
from teacher_logits_client.forks import Home, refuse_to_travel
from teacher_logits_client.slabs.claims import ABANDON_SECONDS, DraftStage, Sealing, abandon, lapsed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    import torch

    from teacher_logits.payload import Payload
    from teacher_logits.payload_room import WriterRoom
    from teacher_logits.selection import Selection
    from teacher_logits_client.drafts.rows import DraftRows
    from teacher_logits_client.slabs.claims import Desk, Granted


class Draft:
    """A payload being written. A context manager; ``Publisher.reserve`` makes one.

    One thread at a time writes and seals it; a publisher's drafts are independent.
    """

    _stage = DraftStage.ABANDONED

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
        self.payload = payload
        self.is_repeat = granted.reservation.is_repeat
        self._rows = rows
        self._micro_batch_size = micro_batch_size
        self._mask_bad_rows = mask_bad_rows
        self._desk = desk
        self._owner = owner
        self._room: WriterRoom | None = granted.room
        tensors, temperatures = granted.room.tensors(payload.columns), len(payload.temperatures)
        self._columns: DraftColumns | None = DraftColumns(
            tensors, rows, temperatures=temperatures, is_written=granted.is_written
        )
        self._sealing: Sealing | None = None
        self._home = Home()
        self._stage = DraftStage.OPEN

    @property
    def payload_id(self) -> str:
        """The payload's id, which it keeps once it is sealed."""
        return self.payload.payload_id

    @property
    def step(self) -> int:
        """The step that it is of."""
        return self.payload.key.step if self.payload.key is not None else -1

    @property
    def rows(self) -> range:
        """The step's rows that it holds."""
        return self._rows.rows

    @property
    def position_count(self) -> int:
        """P: the positions that are to be written."""
        return self._rows.position_count

    @property
    def stage(self) -> str:
        """``open``, ``sealed`` or ``abandoned``; or that a seal was not answered."""
        return self._stage.value

    @property
    def selection(self) -> Selection:
        """The tensors that ``select_top_k`` fills, flat over the positions."""
        return self._whole().selection

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """Views of the columns that a teacher fills, by name: ``topk_ids`` int32 [P,K], ...

        They lie where readers will read them, in the teacher's ``value_type`` where they are
        ``topk_logprobs``. ``write`` takes a teacher's own tensors in more forms.
        """
        return self._whole().columns

    def part(self, rows: range) -> DraftPart:
        """Return some of its rows, by their numbers in the step.

        Raises:
            PayloadInvalidError: they are not among the draft's.
        """
        return self._part(self._rows.part(rows))

    def micro_batches(self, size: int | None = None) -> Iterator[DraftPart]:
        """Yield its rows in order, ``size`` at a time: the grid's micro batches by default.

        Raises:
            PayloadInvalidError: the size is no whole number of at least 1.
        """
        size = self._micro_batch_size if size is None else size
        return map(self._part, self._rows.micro_batches(size))

    def select(
        self,
        logits: torch.Tensor,
        *,
        k: int | None = None,
        temperatures: Sequence[float] | None = None,
        vocab_size: int | None = None,
        next_ids: torch.Tensor | None = None,
    ) -> Selection:
        """Select from the logits of all its rows; see ``DraftPart.select``."""
        return self._whole().select(
            logits, k=k, temperatures=temperatures, vocab_size=vocab_size, next_ids=next_ids
        )

    def write(self, **columns: torch.Tensor | None) -> None:
        """Write columns of all its rows; see ``DraftPart.write``."""
        self._whole().write(**columns)

    def check(self) -> None:
        """Look at all that was written, so that ``seal`` need not, while readers wait for it.

        From here on nobody may write through views that were taken before; what is written by
        ``select``, ``write`` or views taken later is looked at anew. What ``select_top_k`` wrote
        into a draft or its parts was looked at then, and costs nothing here.

        Raises:
            PayloadInvalidError: as for ``seal``; the draft stays open, and may be written anew.
        """
        self._check_open()
        columns = self._columns
        if columns is not None and columns.bad_row_count is None:
            finish(columns, self._rows, self.payload, mask=self._mask_bad_rows)

    def seal(self, *, timeout: float | None = None) -> None:
        """Check it, if that was not done, and have it read from now on; again is fine.

        Where the server did not answer in time it may be sealed all the same: call again to
        know, or abandon it.

        Raises:
            PayloadInvalidError: it was not fully written, holds bad rows, or values that cannot
                be. The draft is abandoned.
            PayloadConflictError: its rows were sealed before, with other bytes.
            ReservationLapsedError: it was abandoned, or its step was retired meanwhile.
            DeadlinePassedError: the server did not answer.
        """
        if self._stage is DraftStage.SEALED:
            return
        self._desk.check()
        self._check_held()
        default = self._desk.default_seconds
        seconds = default if timeout is None else check_timeout(timeout, what="seal")
        until = time.monotonic() + seconds
        if self._sealing is None or self._stage is DraftStage.OPEN:
            try:
                self._sealing = self._finish()
            except BaseException:
                self.abandon()
                raise
        # Before anything is sent, and whatever interrupts it: readers may be let in from here on.
        self._stage = DraftStage.DOUBTFUL
        try:
            self._desk.way.seal(self.payload_id, self._sealing, until=until)
        except (DeadlinePassedError, ServerUnreachableError):
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
        self._end(DraftStage.ABANDONED)
        seconds = ABANDON_SECONDS if timeout is None else check_timeout(timeout, what="abandon")
        try:
            if self._desk.way.abandon(self.payload_id, until=time.monotonic() + seconds):
                self._stage = DraftStage.SEALED
        except TeacherLogitsError:
            self._desk.later(partial(abandon, self._desk.way, self.payload_id))

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
        if not self._desk.is_here() or self._stage not in (DraftStage.OPEN, DraftStage.DOUBTFUL):
            return
        self._stage = DraftStage.ABANDONED
        self._desk.later(partial(abandon, self._desk.way, self.payload_id))
        warnings.warn(
            f"the draft of step {self.step} (payload {self.payload_id}) was dropped without being "
            "sealed or abandoned: use it in a `with` block",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a draft")

    def __repr__(self) -> str:
        return (
            f"<Draft of step {self.step}, rows {self.rows.start} to {self.rows.stop - 1} "
            f"({self.stage})>"
        )

    def _whole(self) -> DraftPart:
        return self._part(self.rows)

    def _part(self, rows: range) -> DraftPart:
        self._check_open()
        if self._columns is None:
            raise ValueError("an open draft has columns")
        return DraftPart(
            rows,
            draft_rows=self._rows,
            columns=self._columns,
            payload=self.payload,
            check_open=self._check_open,
        )

    def _check_open(self) -> None:
        self._check_held()
        if self._stage is DraftStage.DOUBTFUL:
            raise lapsed(self._stage, payload_id=self.payload_id, step=self.step)

    def _check_held(self) -> None:
        self._home.check("draft")
        if self._stage in (DraftStage.SEALED, DraftStage.ABANDONED):
            raise lapsed(self._stage, payload_id=self.payload_id, step=self.step)

    def _finish(self) -> Sealing:
        if self._columns is None or self._room is None:
            raise ValueError("an open draft has room")
        if self._columns.bad_row_count is None:
            self.check()
        self._room.settle()
        return Sealing(
            columns=self.payload.columns,
            bad_row_count=self._columns.bad_row_count or 0,
            valid_count=self._rows.valid_count,
            digest=digest_of(self.payload, self._room) if self.is_repeat else "",
        )

    def _end(self, stage: DraftStage) -> None:
        self._stage = stage
        self._columns = self._room = None
