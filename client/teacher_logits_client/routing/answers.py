"""Routed answers: what several teachers say about one batch, each about its own rows.

Promises: rows come back in the batch's order, whoever answered first; an error says which teacher
it is of, and which row of the batch; what the others have said is not lost with it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import (
    DeadlinePassedError,
    LeaseLostError,
    StalePayloadError,
    TeacherLogitsError,
)
from teacher_logits_client.config import check_timeout
from teacher_logits_client.routing.failing import about
from teacher_logits_client.targets.merging import Part, merge_targets, nothing_known

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.scoring.futures import ScoreFuture
    from teacher_logits_client.targets import Targets


class RoutedFuture:
    """Scores of one batch that several teachers were asked for. ``TeacherRouter`` makes it.

    ``futures`` are each teacher's own and ``rows`` the places of its rows in the batch, by its id:
    who waits for nobody else takes ``futures[teacher_id].result()``.
    """

    def __init__(
        self, futures: Mapping[str, ScoreFuture], rows: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.futures = dict(futures)
        self.rows = dict(rows)

    def result(self, timeout: float | None = None, *, partial: bool = False) -> RoutedPayload:
        """Return what all teachers have said, once all have answered.

        Args:
            timeout: seconds to wait; the requests' own deadlines where not given.
            partial: take what there is then: teachers that failed, or are late, are in
                ``failures``, and their rows have no entries and are not ``valid``.

        Raises:
            TeacherLogitsError: one of them failed, or is late, with its name; or, with
                ``partial``, all of them. Of the others nothing is lost: ask again with
                ``partial``, or ask ``futures``.
            CancelledError: it was cancelled.
        """
        until = None
        if timeout is not None:
            until = time.monotonic() + check_timeout(timeout, what="result")
        late = [name for name, each in self.futures.items() if not each.wait(_left(until))]
        failed = [name for name, each in self.futures.items() if each.has_failed()]
        if not partial:  # before any other is opened, which somebody would have to close
            for name in failed:
                self._open(name, until)
            for name in late:
                self._check_in_time(name, timeout)
        return self._take(until, timeout, late=late, partial=partial)

    def done(self) -> bool:
        """Whether all teachers have answered, or failed."""
        return all(each.done() for each in self.futures.values())

    def cancel(self) -> None:
        """Give up, and give back what comes all the same; results that were handed out stay."""
        for each in self.futures.values():
            each.cancel()

    def _take(
        self, until: float | None, timeout: float | None, *, late: list[str], partial: bool
    ) -> RoutedPayload:
        payloads: dict[str, LeasedPayload] = {}
        failures: dict[str, TeacherLogitsError] = {}
        for name in self.futures:
            try:
                if name in late:
                    self._check_in_time(name, timeout)
                payloads[name] = self._open(name, until)
            except TeacherLogitsError as error:
                if not partial:
                    raise
                failures[name] = error
        if not payloads:
            raise next(iter(failures.values()))
        return RoutedPayload(payloads, failures=failures, asked=self)

    def _open(self, name: str, until: float | None) -> LeasedPayload:
        with about(name, self.rows[name]):
            left = _left(until)
            # It has answered: a moment is enough to say so, however little is left.
            return self.futures[name].result(None if left is None else max(left, _OPENING_SECONDS))

    def _check_in_time(self, name: str, timeout: float | None) -> None:
        if timeout is None or self.futures[name].done():
            return
        with about(name, self.rows[name]):
            raise DeadlinePassedError(
                f"waited {span_text(timeout)} for its scores: ask again, or allow more time",
                facts={"deadline_seconds": timeout},
            )


class RoutedPayload:
    """What several teachers say about one batch; a context manager, as each payload of it is.

    ``payloads`` are the teachers' own and ``rows`` the places of their rows in the batch, by id.
    ``failures`` are the errors of those that said nothing, where that was to be taken.
    """

    def __init__(
        self,
        payloads: Mapping[str, LeasedPayload],
        *,
        failures: Mapping[str, TeacherLogitsError],
        asked: RoutedFuture,
    ) -> None:
        self.payloads = dict(payloads)
        self.failures = dict(failures)
        self.rows = dict(asked.rows)
        self._asked = asked
        self._merged: dict[float, Targets] = {}
        self._closed = False

    @property
    def targets(self) -> Targets:
        """What a loss takes, at temperature 1, in the batch's order; see ``targets_at``."""
        return self.targets_at(1.0)

    def targets_at(self, temperature: float) -> Targets:
        """Return the targets of the whole batch [P,K] at a temperature that all payloads have.

        K is the largest of the teachers', and absent what one lacks. It is a copy, made once,
        unless one teacher has all rows. The rows of ``failures`` are not ``valid``.

        Raises:
            PayloadInvalidError: a payload has no such temperature; or one is a sample and
                another is none.
            LeaseLostError: it is closed.
        """
        if self._closed:
            raise LeaseLostError(
                "the answer of several teachers is closed: stay inside the `with` block with what "
                "it gives, or take targets.clone() along"
            )
        if temperature not in self._merged:
            self._merged[temperature] = self._merge(temperature)
        return self._merged[temperature]

    def close(self) -> None:
        """Give all leases back; twice is fine.

        Raises:
            StalePayloadError: bytes were overwritten meanwhile; the others are closed all the same.
        """
        problems = []
        self._let_go()
        for payload in self.payloads.values():
            try:
                payload.close()
            except StalePayloadError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    def __enter__(self) -> RoutedPayload:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._let_go()
        for payload in self.payloads.values():
            payload.abandon()

    def _let_go(self) -> None:
        self._closed = True
        self._merged.clear()

    def _merge(self, temperature: float) -> Targets:
        parts = []
        for name, payload in self.payloads.items():
            with about(name, self.rows[name]):
                targets = payload.targets_at(temperature)
            parts.append(Part(targets=targets, rows=self.rows[name]))
        if len(self.rows) == 1:
            return parts[0].targets
        like = parts[0].targets
        for name in self.failures:
            unknown = nothing_known(self._asked.futures[name].asked.windows, like)
            parts.append(Part(targets=unknown, rows=self.rows[name]))
        return merge_targets(parts)


_OPENING_SECONDS = 1.0


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
