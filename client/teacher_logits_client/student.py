"""A student rank's session: what can be asked under it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, overload

from teacher_logits import tracing
from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.admitted import Admitted
from teacher_logits_client.config import check_timeout
from teacher_logits_client.rows import make_row_batch
from teacher_logits_client.scoring.asking import (
    check_acquired,
    check_bad_rows,
    check_count,
    check_size,
    scoring_of,
    seed_of,
)
from teacher_logits_client.scoring.chosen_ids import check_given, flatten_ids
from teacher_logits_client.scoring.futures import ScoreFuture

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.payloads.batch import Batch
    from teacher_logits_client.rows import RowBatch
    from teacher_logits_client.rows.flat_rows import Mask, Numbers, Rows
    from teacher_logits_client.scoring.chosen_ids import Ids


class Session(Admitted):
    """An admitted student rank. A context manager; ``Client.open_session`` makes one.

    ``terms`` is what the server granted, ``profile`` what was said to it, hints included.
    ``refusals`` are the wanted transports that are not on offer, with their reasons, and
    ``checks`` what became of each check of the handshake.
    """

    def score(
        self,
        input_ids: Rows,
        lengths: Numbers | None = None,
        *,
        attention_mask: Mask | None = None,
        prefix_ids: Rows | None = None,
        prefix_lengths: Numbers | None = None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
        bad_rows: Literal["reject", "mask"] = "reject",
        seed: int | None = None,
        timeout: float | None = None,
    ) -> ScoreFuture:
        """Have the teacher score rows of token ids; returns at once.

        Args:
            input_ids: integers [N,S], padded on the right, or a list of N rows without padding.
            lengths: true tokens of each row of a rectangle; all S where not given.
            attention_mask: [N,S] instead of ``lengths``: 1 at tokens, 0 at the padding behind
                them. A row that is padded on the left, or has a gap, is refused.
            prefix_ids, prefix_lengths: tokens that only the teacher sees, in front of each
                row; positions count from the student's own first token.
            windows: [N,2], first position and count wanted of each row; all where not given.
            bad_rows: what to do about rows with a NaN or +inf: fail, or mask the row.
            seed: of this request's sample, in place of the session's: one for each epoch, or rows
                that come again bring the same sample again. For sessions of ``Sampled`` alone.
            timeout: seconds until the request is given up; the server's ``default_wait``
                where not given.

        Raises:
            PayloadInvalidError: rows that no server would score, before anything is sent.
            SessionExpiredError, EpochChangedError: the session has ended.
        """
        return self._ask(
            input_ids,
            lengths,
            attention_mask=attention_mask,
            prefix_ids=prefix_ids,
            prefix_lengths=prefix_lengths,
            windows=windows,
            bad_rows=bad_rows,
            seed=seed,
            timeout=timeout,
        )

    def scored_ids(
        self,
        input_ids: Rows,
        lengths: Numbers | None = None,
        *,
        ids: Ids,
        attention_mask: Mask | None = None,
        prefix_ids: Rows | None = None,
        prefix_lengths: Numbers | None = None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
        bad_rows: Literal["reject", "mask"] = "reject",
        timeout: float | None = None,
    ) -> ScoreFuture:
        """Have the teacher score ids of your own choice at each position; returns at once.

        The payload's ``targets`` have these ids, in your order, with the teacher's log-probability
        of each and the mass outside **exactly these**: reverse KL on the student's own best ids is
        exact over them and the rest. What comes back grows with positions times ids, and not with
        the vocabulary.

        Args:
            ids: integers, M a position; -1 where a position wants fewer. [P,M] of the wanted
                positions one behind the other; [N,S,M], read at ``[i, p]`` for position p of row
                i, such as ``student_logits.topk(M).indices``; or a list of N rows.
            input_ids, lengths, attention_mask, prefix_ids, prefix_lengths, windows, bad_rows,
                timeout: as for ``score``.

        Raises:
            PayloadInvalidError: rows or ids that no server would score, before anything is sent:
                an id outside the vocabulary or twice at a position, other positions than are
                wanted, more than the teacher's ``top_k`` a position or than one request may hold.
            SessionExpiredError, EpochChangedError: the session has ended.
        """
        check_given(ids)  # inside, none stands for the K best
        return self._ask(
            input_ids,
            lengths,
            ids=ids,
            attention_mask=attention_mask,
            prefix_ids=prefix_ids,
            prefix_lengths=prefix_lengths,
            windows=windows,
            bad_rows=bad_rows,
            timeout=timeout,
        )

    def _ask(
        self,
        input_ids: Rows,
        lengths: Numbers | None,
        *,
        ids: Ids | None = None,
        attention_mask: Mask | None,
        prefix_ids: Rows | None,
        prefix_lengths: Numbers | None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None,
        bad_rows: str,
        seed: int | None = None,
        timeout: float | None,
    ) -> ScoreFuture:
        self._check()
        check_bad_rows(bad_rows)
        seed = seed_of(seed, self.profile.selection)
        seconds, limit = self._seconds(timeout), self.terms.max_request_tokens
        check_count(input_ids, limit)
        batch = make_row_batch(
            input_ids,
            lengths,
            attention_mask=attention_mask,
            prefix_ids=prefix_ids,
            prefix_lengths=prefix_lengths,
            windows=windows,
            vocabulary_size=self.terms.vocabulary_size,
            prefix_vocabulary_size=self.teacher.vocabulary_size,
        )
        check_size(batch, limit)
        chosen = None if ids is None else self._chosen(ids, batch)
        batch = replace(batch, chosen=chosen, seed=seed)
        return self._send(batch, bad_rows, seconds)

    def _chosen(self, ids: Ids, batch: RowBatch) -> torch.Tensor:
        return flatten_ids(
            ids,
            batch,
            vocabulary_size=self.terms.vocabulary_size,
            most=self.teacher.top_k,
            max_tokens=self.terms.max_request_tokens,
        )

    def _send(self, batch: RowBatch, bad_rows: str, seconds: float) -> ScoreFuture:
        scoring = scoring_of(batch, self.terms.session_id, mask_bad_rows=bad_rows == "mask")
        with self._answers.asking(scoring.request_id):  # an interrupt may come after the request
            pending = self._calls.score(
                scoring,
                what=f"the scores of {batch.rows.row_count} rows with {batch.token_count} tokens",
                timeout=seconds,
            )
            self._answers.expect(pending)
            return ScoreFuture(
                self._answers, pending, batch, reject_bad_rows=bad_rows == "reject", owner=self
            )

    @overload
    def acquire(
        self,
        *,
        step: int,
        input_ids: Rows | None = None,
        lengths: Numbers | None = None,
        attention_mask: Mask | None = None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
        timeout: float | None = None,
    ) -> Batch: ...

    @overload
    def acquire(
        self,
        *,
        payload_id: str,
        input_ids: Rows | None = None,
        lengths: Numbers | None = None,
        attention_mask: Mask | None = None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
        timeout: float | None = None,
    ) -> LeasedPayload: ...

    @tracing.traced("acquire", "step")
    def acquire(
        self,
        *,
        step: int | None = None,
        payload_id: str | None = None,
        input_ids: Rows | None = None,
        lengths: Numbers | None = None,
        attention_mask: Mask | None = None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
        timeout: float | None = None,
    ) -> Batch | LeasedPayload:
        """Lease this rank's rows of a registered step, or a payload that was scored.

        A step is waited for until all its shards are sealed; those behind it are asked for
        ahead (``open_session(prefetch=...)``). A payload is one that another session has
        scored and still leases.

        Args:
            step: the step, from 0 on.
            payload_id: the payload; give this or ``step``.
            input_ids, lengths, attention_mask, windows: the rows that were scored, to compare
                with (see ``score``); of a step this rank's own rows in order, with or without
                the padding of a partial batch.
            timeout: seconds to wait; the server's ``default_wait`` where not given.

        Raises:
            PayloadRetiredError: it is over: nobody leases it, or all readers have read it.
            ProducerLostError: a publisher died with some of the step.
            DeadlinePassedError: the step was not complete by then, or the server is stopped.
            AlignmentError: it is about other rows than those given.
            PayloadInvalidError: it has less than was asked for, or ``input_ids`` other rows.
        """
        # A batch that was made ahead is had without a look at anything else: the end of a session
        # is no reason to hold back what it has.
        extra = payload_id, input_ids, lengths, attention_mask, windows
        if type(step) is int and all(each is None for each in extra):
            self._answers.check_here()
            self._seconds(timeout)
            ready = self._steps.acquire_ready(step)
            if ready is not None:
                return ready
        self._check(look=step is None)
        check_acquired(step, payload_id)
        seconds = self._seconds(timeout)
        until = time.monotonic() + seconds
        batch = self._rows_to_compare(input_ids, lengths, attention_mask, windows)
        if step is not None:
            return self._steps.acquire(step, batch=batch, seconds=seconds)
        return self._answers.acquire(
            str(payload_id), batch=batch, until=until, seconds=seconds, calls=self._calls
        )

    def _rows_to_compare(
        self,
        input_ids: Rows | None,
        lengths: Numbers | None,
        attention_mask: Mask | None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None,
    ) -> RowBatch | None:
        if input_ids is not None:
            return make_row_batch(
                input_ids,
                lengths,
                attention_mask=attention_mask,
                windows=windows,
                vocabulary_size=self.terms.vocabulary_size,
                prefix_vocabulary_size=self.teacher.vocabulary_size,
            )
        if not (lengths is attention_mask is windows is None):
            raise PayloadInvalidError(
                "lengths, attention_mask or windows came without input_ids: give those too"
            )
        return None

    def _seconds(self, timeout: float | None) -> float:
        default = self._answers.default_seconds
        return default if timeout is None else check_timeout(timeout, what="a call")
