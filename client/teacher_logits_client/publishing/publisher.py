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
import time
import weakref
from typing import TYPE_CHECKING, Literal

from teacher_logits.errors import (
    DeadlinePassedError,
    SessionExpiredError,
    TeacherLogitsError,
)
from teacher_logits.shard_parts import shard_of
from teacher_logits_client.config import check_timeout
from teacher_logits_client.drafts.rows import Given
from teacher_logits_client.dropped import warn_dropped
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.publishing.desk import PublisherDesk
from teacher_logits_client.publishing.publisher_rows import rows_of_step
from teacher_logits_client.publishing.reserving import Asked, reserve_draft
from teacher_logits_client.sessions.liveness import Liveness
from teacher_logits_client.slabs.own_buffers import register

if TYPE_CHECKING:
    from types import TracebackType

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits.terms import SessionTerms
    from teacher_logits.transport import Refusal, Transport
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.drafts import Draft
    from teacher_logits_client.drafts.rows import Windows
    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.rows.flat_rows import Mask, Numbers, Rows
    from teacher_logits_client.rows.valid_counts import LossMask
    from teacher_logits_client.sessions.agreement import AgreedPublisher
    from teacher_logits_client.slabs.claims import Way
    from teacher_logits_client.slabs.own_buffers import OwnBuffer, Storage
    from teacher_logits_client.slabs.placed_columns import OwnColumns

_log = logging.getLogger("teacher_logits_client")


class Publisher:
    """An admitted publisher. A context manager; ``Client.open_publisher`` makes one.

    ``terms`` is what the server granted and ``profile`` what was said to it, hints included.
    ``transport`` is how it and the server are joined, ``refusals`` why not by a better one.
    """

    _closed = True
    _ended = True  # what a close does is done; one that was interrupted is done again

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
        self._closed = self._ended = False

    @property
    def shard(self) -> int:
        """The shard that it writes: its data-parallel rank, where that is not divided."""
        return shard_of(self.profile)

    def rows_of_step(self, real_rows: int | None = None) -> range:
        """Return the rows of a step that this rank writes, padding left out.

        Empty, and false, where a partial last batch leaves it padding alone: it publishes nothing
        for that step then. ``real_rows`` as for ``reserve``.

        Raises:
            PayloadInvalidError: no step has as many real rows.
        """
        return rows_of_step(self.profile, real_rows=real_rows)

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
        columns: OwnColumns | None = None,
        bad_rows: Literal["reject", "mask"] = "reject",
        timeout: float | None = None,
    ) -> Draft:
        """Claim rows of a step and wait for room to write them.

        N rows are given in the step's order; padding rows of a partial last batch may stand
        behind them or be left out. They are whole rows on each rank of a teacher that divides them
        (``sharded_by``): the draft then holds this rank's part, and takes its own logits.

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
            real_rows: rows of the whole step that are no padding; all where not given. See
                ``rows_of_step`` for a rank that has padding alone.
            columns: tensors of the caller's own, in registered memory (``register``), that hold
                the columns over positions, or will at the seal; nothing of them is copied.
            bad_rows: what to do about rows with a NaN or +inf: refuse the draft, or mask them.
            timeout: seconds to wait for room; the server's ``default_wait`` where not given.

        Raises:
            PayloadInvalidError: rows that no server would take, before anything is sent; more
                than the pool could ever hold; or padding alone.
            PayloadConflictError: the rows are reserved already, or another shard's.
            PayloadRetiredError: the step is over.
            PoolFullError: no room came free in time.
            SessionExpiredError, EpochChangedError: the session has ended.
            DrainingError: the server is shutting down.
        """
        self.check()
        asked = Asked(
            step=step,
            rows=rows,
            given=Given(
                input_ids=input_ids,
                lengths=lengths,
                attention_mask=attention_mask,
                windows=windows,
                loss_mask=loss_mask,
            ),
            real_rows=real_rows,
            columns=columns,
            bad_rows=bad_rows,
        )
        until = time.monotonic() + self._seconds(timeout)
        draft = reserve_draft(self._desk, self.profile, asked, until=until, owner=self)
        self._drafts.add(draft)
        return draft

    def register(self, storage: Storage) -> OwnBuffer:
        """Register device memory of the caller's own, once; see ``own_buffers``.

        Args:
            storage: a contiguous tensor over all of it, on the publisher's device. It stays the
                caller's, and is kept alive until nobody reads it any more.

        Raises:
            RequestInvalidError: the publisher writes to no device, or the memory is of a kind that
                no other process can open; it says which, and the setting to change.
            DeviceError: the driver refuses.
            NotAvailable: the system has no memory or descriptor for it.
        """
        self.check()
        return register(self._desk.way, storage)

    def wait_free(self, *, timeout: float | None = None) -> None:
        """Wait until students have read all that was sealed, and its room is free.

        Device memory that is still read when a publisher is closed stays allocated: wait before
        ``close`` where the process lives on.

        Raises:
            DeadlinePassedError: somebody reads after ``timeout`` seconds, with whom.
        """
        self.check()
        self._desk.way.wait_free(until=time.monotonic() + self._seconds(timeout))

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

        What is sealed stays readable until all students have read it. What lies on a device
        alone does not: it is waited for here, as long as the client's timeout, and then lost to
        those who have not read it. In a forked child nothing happens.
        """
        if self._ended or not self._returner.is_here:
            return
        for draft in list(self._drafts):
            draft.abandon()
        self._closed = True
        self._await_readers()
        self._desk.liveness.end_and_wait("publisher")
        self._ended = True

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
        if self._ended or not self._returner.is_here:
            return
        self._desk.liveness.end()
        if not self._closed:
            warn_dropped(f"publisher {self.terms.session_id}", self)

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a publisher")

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.transport.value
        return f"<Publisher of {self.profile.teacher_id}, shard {self.shard} ({state})>"

    def _await_readers(self) -> None:
        try:
            until = time.monotonic() + self._timeout
            self._desk.way.wait_free(until=until, but_copied=True)
        except DeadlinePassedError as late:
            _log.warning(
                "publisher %s is closed, and its payloads on the device are lost to students that "
                "have not read them: %s",
                self.terms.session_id,
                late.message,
            )
        except TeacherLogitsError as error:  # the line or the server is gone, and all with it
            _log.debug("publisher %s waits for nobody: %s", self.terms.session_id, error.message)

    def _seconds(self, timeout: float | None) -> float:
        default = self._desk.default_seconds
        return default if timeout is None else check_timeout(timeout, what="reserve")
