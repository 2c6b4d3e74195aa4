"""Leased payloads: what a student reads, for as long as its lease is open.

Tensors are views of the leased memory, one a column, made without a copy unless one was
asked for. Closing a lease empties the payload and every targets object made from it, so that
only tensors which the owner took out count as views; one that is still there is named in a
``ResourceWarning``, and keeps the room taken until it is gone. The close checks once more
that the bytes were not overwritten meanwhile: let it come before the optimizer's step.
"""

from __future__ import annotations

import math
import threading
import warnings
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.digest import payload_digest
from teacher_logits.errors import StalePayloadError
from teacher_logits.layout import ColumnKind
from teacher_logits_client.dropped import warn_dropped
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.openers.own import OwnPayload
from teacher_logits_client.payloads.columns import LeasedColumns, NamedColumns
from teacher_logits_client.payloads.guards import check_scored
from teacher_logits_client.payloads.handed_out import HandedOut
from teacher_logits_client.payloads.row_columns import Part
from teacher_logits_client.targets import Targets, check_temperature, make_targets
from teacher_logits_client.targets.leased_targets import LeasedTargets, Made, lease_targets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from teacher_logits.payload import Payload
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import Check, LeaseTerms
    from teacher_logits.transport import Transport
    from teacher_logits_client.openers import OpenedPayload
    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.rows import RowBatch


class LeasedPayload(HandedOut):
    """One payload under lease; a context manager, which every user of one should be in.

    ``payload`` describes it, ``transport`` how it came, and ``checks`` what was compared first.
    """

    _closed = True

    def __init__(
        self,
        *,
        lease: LeaseTerms,
        opened: OpenedPayload,
        transport: Transport,
        returner: Returner,
        give_back: Callable[[], None],
        check_digest: bool = False,
    ) -> None:
        """Make ready what an opened lease holds; it is its owner's from ``adopt`` on."""
        self.payload: Payload = lease.payload
        self.transport = transport
        self.lease_id = lease.lease_id
        self.checks: tuple[Check, ...] = ()
        self._opened = opened
        self._returner = returner
        self._made = Made(
            what=f"lease {lease.lease_id} of payload {lease.payload.payload_id}",
            again="the payload",
            facts={"lease_id": lease.lease_id, "payload_id": lease.payload.payload_id},
        )
        own = isinstance(opened, OwnPayload)
        self._kinds = LeasedColumns(
            lease.payload,
            opened,
            self._made,
            watch=None if own else partial(returner.watch, lease.lease_id),
            encoding=lease.encoding,
        )
        self._at_temperature: dict[float, LeasedTargets] = {}
        self._lengths: torch.Tensor | None = None
        self._expected = returner.expect(lease.lease_id, opened, give_back=give_back)
        self._check_digest = check_digest
        self._digest: str | None = None
        self._closing = threading.RLock()
        #: What the exit check found: the room may be another's when a close is tried again.
        self._found: tuple[StalePayloadError | None] | None = None

    def make_ahead(self, kinds: Sequence[ColumnKind]) -> None:
        """Make tensors of some columns before there is an owner, who may never come."""
        own = isinstance(self._opened, OwnPayload)
        watch = None if own else partial(self._returner.watch_ahead, self.lease_id)
        self._expected.lease.views |= self._kinds.make(kinds, watch=watch)

    def drop_ahead(self) -> None:
        """Let go of the tensors that were made ahead: nobody will adopt it."""
        self._kinds.empty()

    def adopt(self) -> LeasedPayload:
        """Hand it over to its owner, and return it."""
        self._closed = False  # first: who is interrupted here drops it
        self._returner.adopt(self._expected)
        if self._check_digest:
            self._digest = self.digest()
        return self

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The payload's columns by name, e.g. ``topk_ids`` int32 [P,K]; see ``layout``.

        Raises:
            LeaseLostError: it is closed; so says the mapping too, to who has kept it.
        """
        self._check_open()
        return NamedColumns(self._kinds, self._made)

    @property
    def row_offsets(self) -> torch.Tensor:
        """Where each row's positions start, int64 [N+1]."""
        self._check_open()
        return self._kinds[ColumnKind.ROW_OFFSETS]

    @property
    def targets(self) -> Targets:
        """What a loss takes, [P,K] at temperature 1. The same object each time."""
        return self.targets_at(1.0)

    def targets_at(self, temperature: float) -> Targets:
        """Return targets [P,K] at one of the payload's temperatures.

        Raises:
            PayloadInvalidError: the payload has no such temperature; it says which it has.
            LeaseLostError: it is closed.
        """
        self._check_open()
        check_temperature(temperature)
        if temperature not in self._at_temperature:
            made = make_targets(
                self._kinds,
                temperature=self._own_temperature(temperature),
                temperatures=self.payload.temperatures,
                lengths=self._row_lengths(),
                bound=self._kinds.bound,
                vocab_size=self.payload.vocabulary_size,
            )
            self._at_temperature[temperature] = lease_targets(made, self._made)
        return self._at_temperature[temperature]

    def _row_lengths(self) -> torch.Tensor | None:
        """Return the tokens of each row, where they are known here or the payload says so."""
        if self._lengths is None and self.payload.whole_rows:
            return self._kinds[ColumnKind.ROW_OFFSETS].diff()
        return self._lengths

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Have the lease go back only behind what a stream was given before its close.

        For streams other than the one that is current there; see ``torch.Tensor.record_stream``.
        """
        self._check_open()
        self._opened.note_stream(stream)

    def part(self, first: int, row_count: int) -> Part:
        """Return some of the payload's rows as views, which end with the lease."""
        return Part(self.payload, self._kinds, first=first, row_count=row_count)

    def digest(self) -> str:
        """Return a digest of the columns as they are now, in hex: the same over every transport."""
        self._check_open()
        return payload_digest(
            (
                column.kind.value,
                column.element_type.value,
                column.shape,
                self._opened.bytes_of(column),
            )
            for column in self.payload.columns
        )

    def _close(self, *, warn_level: int) -> None:
        problem, outliving = self.let_go()
        if problem is not None:
            raise problem
        if outliving and warn_level:
            warnings.warn(
                f"lease {self.lease_id} of payload {self.payload.payload_id} was closed while "
                f"tensors over {', '.join(outliving)} are alive: its room stays taken until they "
                "are gone; drop them inside the `with` block, or clone what must outlive it",
                ResourceWarning,
                stacklevel=warn_level,
            )

    def let_go(self) -> tuple[StalePayloadError | None, list[str]]:
        """Close, and say what the exit check found, and which columns others still view.

        For who closes several payloads at once; the others ``close`` it.
        """
        if not self._returner.is_here:  # a fork's copy of the lock may be another thread's
            return None, []
        with self._closing:
            if self._closed:
                return None, []
            if self._found is None:
                self._found = (self._exit_check(),)
            problem = self._found[0]
            self._at_temperature.clear()
            outliving = self._kinds.empty()
            self._opened.finish(outlived=bool(outliving))
            self._returner.close(self.lease_id, outlived=bool(outliving))
            self._closed = True  # from here on, or an interrupt would leave it to nobody
            self._found = None  # a raised error has the frames of who reads, and these have this
        if problem is not None:
            self._returner.count("stale_payloads")
        return problem, outliving

    def drop(self) -> None:
        """Note that the owner went without closing it; safe in a finaliser, which may not wait."""
        self._closed = self._made.is_over = True
        self._returner.drop(self.lease_id)

    def __enter__(self) -> LeasedPayload:
        self._check_open()
        return self

    def __del__(self) -> None:
        if self._closed or not self._returner.is_here:
            return
        self.drop()
        warn_dropped(f"lease {self.lease_id} of payload {self.payload.payload_id}", self)

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a lease", "hand on clones, such as payload.targets.clone()")

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.transport.value
        return f"<LeasedPayload {self.payload.payload_id} ({state})>"

    def check(
        self, batch: RowBatch | None, profile: StudentProfile, *, reject_bad_rows: bool
    ) -> None:
        """Hold the payload against what was asked for, before it is handed out; see ``guards``.

        ``batch`` are the rows that were sent, None where they are not known here.
        """
        self._lengths = None if batch is None else batch.rows.lengths
        self.checks = check_scored(
            self.payload, self._kinds, batch=batch, profile=profile, reject_bad_rows=reject_bad_rows
        )

    def _own_temperature(self, temperature: float) -> float:
        """Return the payload's form of a temperature, which travelled as fp32."""
        near = (t for t in self.payload.temperatures if math.isclose(t, temperature, rel_tol=1e-6))
        return next(near, temperature)

    def _exit_check(self) -> StalePayloadError | None:
        if not self._opened.is_current():
            return StalePayloadError(
                f"the room of payload {self.payload.payload_id} was reused, or taken back by an "
                f"operator's reclaim, while lease {self.lease_id} was open: discard everything "
                "that was computed from it",
                facts=self._made.facts,
            )
        if self._digest is not None and self.digest() != self._digest:
            return StalePayloadError(
                f"the bytes of payload {self.payload.payload_id} were changed while lease "
                f"{self.lease_id} was open: discard everything that was computed from it",
                facts=self._made.facts,
            )
        return None

    def _check_open(self) -> None:
        self._returner.check_here("lease")
        if self._closed:
            raise self._made.lost()
