"""Batches: one data-parallel rank's rows of one registered step, under lease.

Rows are in global order, over however many shards hold them, and are handed out whole or in
micro batches. Those that lie in one shard are views of it; those that span shards are one
copy, and say so (``copied``). The rows of a partial last batch that are padding have no
positions; they are the last.

Promises of ``payloads`` hold for all leases at once: closing empties the batch, its micro
batches and every targets object made from them, names what outlives it in one
``ResourceWarning``, and checks once more that no bytes were overwritten: let it come before
the optimizer's step.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING

from teacher_logits.layout import ColumnKind
from teacher_logits_client.dropped import warn_dropped
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.payloads.checked_rows import CheckedRows
from teacher_logits_client.payloads.handed_out import HandedOut
from teacher_logits_client.payloads.micro_batches import MicroBatch, RowTargets
from teacher_logits_client.payloads.row_columns import RowColumns, Shape, is_copy
from teacher_logits_client.targets.leased_targets import Made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from teacher_logits.errors import StalePayloadError
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import Check, StepGrant
    from teacher_logits.transport import Transport
    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.payloads.row_parts import RowPart
    from teacher_logits_client.rows import RowBatch
    from teacher_logits_client.targets import Targets

TAKEN_BY_LOSSES = (ColumnKind.TOPK_IDS, ColumnKind.TOPK_LOGPROBS, ColumnKind.LOG_TAIL)


class Batch(HandedOut):
    """A rank's rows of a step; a context manager, which every user of one should be in.

    ``rows`` are their global numbers, padding included, ``row_count`` of them; the first
    ``real_row_count`` are no padding. ``global_count`` are the positions of the whole step that
    count, to divide the loss by once; None where the step's publishers registered no masks:
    then the sum over ranks of the counts that losses return is the number.
    """

    _closed = True

    def __init__(
        self,
        grant: StepGrant,
        parts: Sequence[RowPart],
        payloads: Sequence[LeasedPayload],
        *,
        rows: range,
        profile: StudentProfile,
        returner: Returner,
        when_closing: Callable[[int], None],
    ) -> None:
        """Make ready what a step's leases opened; it is its owner's from ``adopt`` on.

        ``when_closing`` is called with the step before its leases go back.
        """
        self.step = grant.step
        self.rows = rows
        self.real_row_count = sum(part.row_count for part in parts)
        self.global_count = grant.global_count
        #: How the bytes of each payload came, by the payload's id.
        self.transports: dict[str, Transport] = {
            each.payload.payload_id: each.transport for each in payloads
        }
        #: Whether the rows span shards, so that what is taken of all of them is a copy.
        self.copied = is_copy(parts)
        self._grant: StepGrant | None = grant
        self._parts = parts
        self._payloads = payloads
        self._profile = profile
        self._returner = returner
        self._when_closing = when_closing
        self._checked = CheckedRows(parts, rows=rows, is_sealed=not grant.awaited)
        self._made = Made(
            what=f"the batch of step {grant.step}", again="the step", facts={"step": grant.step}
        )
        self._shape: Shape | None = None
        self._handed_out: list[weakref.ref[RowColumns]] = []
        self._whole: RowTargets | None = None
        self._closing = threading.RLock()

    def make_ahead(self) -> None:
        """Make the tensors that a loss takes before there is an owner, who may never come."""
        for payload in self._payloads:
            payload.make_ahead(TAKEN_BY_LOSSES)
        if not self.copied and self.real_row_count == self.row_count:
            self._whole = self._take(0, self.row_count)
            self._whole.make_ahead(TAKEN_BY_LOSSES)

    def adopt(self) -> Batch:
        """Hand it over to its owner, and return it."""
        for payload in self._payloads:
            payload.adopt()
        self._closed = False
        return self

    def drop(self) -> None:
        """Let go of what was made ahead: nobody will adopt it."""
        self._whole = None
        for payload in self._payloads:
            payload.drop_ahead()

    def check(self, own: RowBatch | None) -> None:
        """Hold it against its seal and the rank's own rows, before it is handed out.

        Raises:
            PayloadInvalidError, AlignmentError: see ``CheckedRows``.
        """
        if self._grant is not None and self._grant.awaited:
            self._checked.look_again()
        if own is not None:
            self._checked.compare(own)
            self._whole = None

    @property
    def checks(self) -> tuple[Check, ...]:
        """What was compared before it was handed out, and what could not be."""
        return self._checked.checks

    @property
    def row_count(self) -> int:
        """Rows, padding included."""
        return len(self.rows)

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The columns of all rows by name, e.g. ``topk_ids`` int32 [P,K]; see ``layout``."""
        return self._all().columns

    @property
    def targets(self) -> Targets:
        """What a loss takes, [P,K] of all rows, at temperature 1. The same object each time."""
        return self._all().at(1.0)

    def targets_at(self, temperature: float) -> Targets:
        """Return targets of all rows at one of the payloads' temperatures.

        Raises:
            PayloadInvalidError: they have no such temperature; it says which they have.
            LeaseLostError: the batch is closed.
        """
        return self._all().at(temperature)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the rows in pieces of the profile's ``micro_batch_size``, in order.

        A micro batch of padding alone has no positions: its loss is 0, with a count of 0.
        """
        self._check_open()
        size = self._profile.batch_grid.micro_batch_size
        for first in range(0, self.row_count, size):
            count = min(size, self.row_count - first)
            real = min(max(self.real_row_count - first, 0), count)
            start = self.rows.start + first
            yield MicroBatch(
                self._take(first, count),
                rows=range(start, start + count),
                index=slice(first, first + real),
            )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Have the leases go back only behind what a stream was given before their close.

        For streams other than the one that is current there; see ``torch.Tensor.record_stream``.
        """
        self._check_open()
        for payload in self._payloads:
            payload.record_stream(stream)

    def __enter__(self) -> Batch:
        self._check_open()
        return self

    def __del__(self) -> None:
        if self._closed or not self._returner.is_here:
            return
        self._closed = True
        for payload in self._payloads:
            payload.drop()
        warn_dropped(f"the batch of step {self.step}", self)

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a batch")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"rows {self.rows.start} to {self.rows.stop - 1}"
        return f"<Batch of step {self.step} ({state})>"

    def _all(self) -> RowTargets:
        self._check_open()
        if self._whole is None:
            self._whole = self._take(0, self.row_count)
        return self._whole

    def _take(self, first: int, count: int) -> RowTargets:
        """Return rows of the batch, from its row ``first`` on."""
        shape = self._shape = self._shape or Shape.of(self._parts, self._profile)
        taken, start = [], 0
        for part in self._parts:
            low, high = max(first, start), min(first + count, start + part.row_count)
            if low < high:
                whole = high - low == part.row_count
                taken.append(part if whole else part.rows(low - start, high - low))
            start += part.row_count
        real = min(max(self.real_row_count - first, 0), count)
        columns = RowColumns(taken, padding_rows=count - real, shape=shape)
        self._handed_out.append(weakref.ref(columns))
        lengths = self._checked.lengths_of(first, count)
        return RowTargets(
            columns, temperatures=shape.temperatures, lengths=lengths, made=self._made
        )

    def _close(self, *, warn_level: int) -> None:
        if not self._returner.is_here:
            return
        with self._closing:
            problems, outliving = self._let_go()
        if problems:
            raise problems[0]
        if outliving and warn_level:
            warnings.warn(
                f"the batch of step {self.step} was closed while tensors over "
                f"{', '.join(outliving)} are alive: the room of its payloads stays taken until "
                "they are gone; drop them inside the `with` block, or clone what must outlive it",
                ResourceWarning,
                stacklevel=warn_level,
            )

    def _let_go(self) -> tuple[list[StalePayloadError], list[str]]:
        """Close all that is not closed yet: what an interrupt left of a close before this."""
        problems: list[StalePayloadError] = []
        outliving: list[str] = []
        if self._closed and not self._payloads:
            return problems, outliving
        self._closed = True
        self._made.empty_all()
        for reference in self._handed_out:
            columns = reference()
            if columns is not None:
                columns.empty()
        self._whole = None
        try:
            self._when_closing(self.step)
        finally:
            for payload in self._payloads:
                problem, names = payload.let_go()
                problems += [] if problem is None else [problem]
                outliving += [name for name in names if name not in outliving]
        # What is let go of here is not let go of where the next batch takes this one's name.
        self._grant, self._parts, self._shape = None, (), None
        self._checked.let_go()
        self._payloads = ()
        return problems, outliving

    def _check_open(self) -> None:
        if self._closed or not self._returner.is_here:
            self._returner.check_here("batch")
            raise self._made.lost()
