"""A publisher: one data-parallel rank of a teacher, which writes payloads where they are read.

    with tl.connect(address) as client, client.open_publisher(profile) as publisher:
        with publisher.reserve(step=7, input_ids=input_ids, lengths=lengths) as draft:
            tl.select_top_k(logits, out=draft)

Where it shares memory with the server, it writes into slabs of its own, which students map;
elsewhere into a buffer, which is streamed to the server. What it has sealed stays readable
after its end, until every student has read it. Any thread may use it; a forked child may not.
A publisher that is dropped unclosed is named in a ``ResourceWarning`` and ended.
"""

from __future__ import annotations

import logging
import secrets
import time
import warnings
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from teacher_logits.clock import span_text
from teacher_logits.errors import (
    DeadlinePassedError,
    PayloadInvalidError,
    SessionExpiredError,
    TeacherLogitsError,
)
from teacher_logits.grid import is_whole
from teacher_logits.keys import STEP_LIMIT
from teacher_logits_client.claims import Claim
from teacher_logits_client.config import check_timeout
from teacher_logits_client.desk import PublisherDesk
from teacher_logits_client.draft_columns import describe
from teacher_logits_client.draft_rows import Given, make_draft_rows, rows_to_write
from teacher_logits_client.drafts import Draft
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.liveness import Liveness

if TYPE_CHECKING:
    from types import TracebackType

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.terms import SessionTerms
    from teacher_logits.transport import Refusal, Transport
    from teacher_logits_client.agreement import AgreedPublisher
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.claims import Way
    from teacher_logits_client.draft_rows import DraftRows, Windows
    from teacher_logits_client.flat_rows import Mask, Numbers, Rows
    from teacher_logits_client.returns import Returner
    from teacher_logits_client.valid_counts import LossMask

_log = logging.getLogger("teacher_logits_client")


class Publisher:
    """An admitted publisher. A context manager; ``Client.open_publisher`` makes one.

    ``terms`` is what the server granted and ``profile`` what was said to it, hints included.
    """

    _closed = True

    def __init__(
        self,
        agreed: AgreedPublisher,
        *,
        way: Way,
        calls: Calls,
        returner: Returner,
        owner: object,
        timeout: float,
    ) -> None:
        """Take over an agreed session; ``Client``, its owner, does this."""
        self._owner = owner
        self.terms: SessionTerms = agreed.terms
        self.profile: TeacherProfile = agreed.profile
        self.transport: Transport = agreed.transport
        self.refusals: tuple[Refusal, ...] = agreed.refusals
        self._desk = PublisherDesk(
            way,
            liveness=Liveness(
                agreed.terms, calls=calls, returner=returner, reader=way, timeout=timeout
            ),
            returner=returner,
            default_seconds=agreed.terms.default_wait.total_seconds(),
        )
        self._returner = returner
        self._timeout = timeout
        self._drafts: weakref.WeakSet[Draft] = weakref.WeakSet()
        self._closed = False

    @property
    def shard(self) -> int:
        """The shard that it writes: its data-parallel rank."""
        return self.profile.data_parallel_rank

    def reserve(
        self,
        step: int,
        rows: range | None = None,
        *,
        input_ids: Rows | None = None,
        lengths: Numbers | None = None,
        attention_mask: Mask | None = None,
        windows: Windows | None = None,
        loss_mask: LossMask | None = None,
        real_rows: int | None = None,
        bad_rows: Literal["reject", "mask"] = "reject",
        timeout: float | None = None,
    ) -> Draft:
        """Claim rows of a step and wait for room to write them.

        N rows are given in the step's order; padding rows of a partial last batch may stand
        behind them or be left out.

        Args:
            step: from 0 to 2**62 - 1.
            rows: the step's rows; by default those that the batch grid gives this rank, cut at
                ``real_rows``.
            input_ids: integers [N,S], or a list of N rows without padding. Their digests let
                students see that these are their rows; without them (give ``lengths`` then)
                that stays unchecked, and ``actual_logprob`` needs ``next_ids``.
            lengths, attention_mask: of a rectangle, one of them: true tokens of each row, or 1
                at each token and 0 at padding behind them; all S where not given.
            windows: [N,2], first position and count written of each row; all where not given.
            loss_mask: which positions count, as the losses take it: marks [N,S], marks of each
                row, or a number a row. A row's last position never counts. With it, students
                are told the count of the whole step.
            real_rows: rows of the step that are no padding; all where not given.
            bad_rows: what to do about rows with a NaN or +inf: refuse the draft, or mask them.
            timeout: seconds to wait for room; the server's ``default_wait`` where not given.

        Raises:
            PayloadInvalidError: rows that no server would take, before anything is sent.
            PayloadConflictError: the rows are reserved already, or another shard's.
            PayloadRetiredError: the step is over.
            PoolFullError: no room came free in time, or it can never fit.
            SessionExpiredError, EpochChangedError: the session has ended.
            DrainingError: the server is shutting down.
        """
        self.check()
        until = time.monotonic() + self._seconds(timeout)
        _check_asked(step, bad_rows)
        own, padded = rows_to_write(self.profile, rows, real_rows=real_rows)
        given = Given(
            input_ids=input_ids,
            lengths=lengths,
            attention_mask=attention_mask,
            windows=windows,
            loss_mask=loss_mask,
        )
        draft_rows = make_draft_rows(self.profile, own, padded, given)
        claim = Claim(
            request_id=secrets.token_hex(12),
            payload=describe(self.profile, int(step), draft_rows),
            row_positions=tuple(draft_rows.row_positions),
            real_rows=0 if real_rows is None else int(real_rows),
        )
        draft = self._draft(claim, draft_rows, until, mask_bad_rows=bad_rows == "mask")
        self._drafts.add(draft)
        return draft

    def check(self) -> None:
        """Refuse to go on in a forked child, once it is closed, and once its session has ended.

        Raises:
            ForkedClientError, SessionExpiredError, EpochChangedError: as it says.
        """
        self._returner.check_here("publisher")
        if self._closed:
            raise SessionExpiredError(
                f"publisher {self.terms.session_id} was closed by this client; open a new one",
                facts={"session_id": self.terms.session_id},
            )
        self._desk.check()

    def close(self) -> None:
        """Abandon what is not sealed and end the session; twice is fine.

        What is sealed stays readable until all students have read it. In a forked child
        nothing happens.
        """
        if self._closed or not self._returner.is_here:
            return
        for draft in list(self._drafts):
            draft.abandon()
        self._closed = True
        self._desk.liveness.end()
        if not self._returner.wait(self._timeout):
            _log.warning(
                "publisher %s: the server did not hear of its end within %s",
                self.terms.session_id,
                span_text(self._timeout),
            )

    def __enter__(self) -> Publisher:
        self.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._closed or not self._returner.is_here:
            return
        self._closed = True
        self._desk.liveness.end()
        warnings.warn(
            f"publisher {self.terms.session_id} was dropped without being closed: use it in a "
            "`with` block",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a publisher")

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.transport.value
        return f"<Publisher of {self.profile.teacher_id}, shard {self.shard} ({state})>"

    def _draft(self, claim: Claim, rows: DraftRows, until: float, *, mask_bad_rows: bool) -> Draft:
        way = self._desk.way
        try:
            with self._desk.liveness.noting():
                granted = way.reserve(claim, until=until)
        except DeadlinePassedError:
            self._desk.later(partial(_give_up, way, claim))  # it may be granted all the same
            raise
        grid = self.profile.batch_grid
        try:
            draft = Draft(
                granted,
                payload=replace(claim.payload, payload_id=granted.reservation.payload_id),
                rows=rows,
                micro_batch_size=grid.micro_batch_size if grid is not None else 1,
                mask_bad_rows=mask_bad_rows,
                desk=self._desk,
                owner=self,
            )
            if not draft.is_repeat:
                way.announce(draft.payload_id, rows.valid_count)
            return draft
        except BaseException:
            self._desk.later(partial(_give_up, way, claim))
            raise

    def _seconds(self, timeout: float | None) -> float:
        default = self._desk.default_seconds
        return default if timeout is None else check_timeout(timeout, what="reserve")


def _give_up(way: Way, claim: Claim) -> None:
    try:
        way.give_up(claim)
    except TeacherLogitsError as error:
        # Once: what is left of it goes with the session.
        _log.debug("a claim on step %d was not given up: %s", claim.step, error.message)


def _check_asked(step: object, bad_rows: object) -> None:
    if not is_whole(step) or not 0 <= step < STEP_LIMIT:
        raise PayloadInvalidError(
            f"step is {step!r}: give a whole number from 0 to 2**62 - 1", facts={"step": str(step)}
        )
    if bad_rows not in ("reject", "mask"):
        raise PayloadInvalidError(
            f"bad_rows={bad_rows!r} is no policy: give 'reject' or 'mask'",
            facts={"bad_rows": str(bad_rows)},
        )
