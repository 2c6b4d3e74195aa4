"""A student rank's session: what was agreed in the handshake, and what can be asked under it.

Prints nothing. Refuses to be used after its end, and in a forked child of its process. A
session that is dropped unclosed is named in a ``ResourceWarning`` and ended.
"""

from __future__ import annotations

import logging
import secrets
import time
import warnings
from typing import TYPE_CHECKING, Literal, NoReturn

from teacher_logits.errors import PayloadInvalidError, SessionExpiredError
from teacher_logits_client.answers import Answers
from teacher_logits_client.calls import Scoring
from teacher_logits_client.config import check_timeout
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.futures import ScoreFuture
from teacher_logits_client.liveness import Liveness
from teacher_logits_client.rows import make_row_batch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    import torch

    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.terms import Check, SessionTerms
    from teacher_logits.transport import Refusal, Transport
    from teacher_logits_client.agreement import Agreed
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.payloads import LeasedPayload
    from teacher_logits_client.reader import Reader
    from teacher_logits_client.returns import Returner
    from teacher_logits_client.rows import Numbers, RowBatch, Rows

_log = logging.getLogger("teacher_logits_client")


class Session:
    """An admitted student rank. A context manager; ``Client.open_session`` makes one.

    ``terms`` is what the server granted, ``profile`` what was said to it, hints included.
    ``refusals`` are the wanted transports that are not on offer, with their reasons, and
    ``checks`` what became of each check of the handshake.
    """

    _closed = True

    def __init__(
        self,
        agreed: Agreed,
        *,
        calls: Calls,
        returner: Returner,
        reader: Reader,
        owner: object,
        timeout: float,
    ) -> None:
        """Take over an agreed session; ``Client``, its owner, does this."""
        self._owner = owner
        self.terms: SessionTerms = agreed.terms
        self.profile: StudentProfile = agreed.profile
        self.refusals: tuple[Refusal, ...] = agreed.refusals
        self._calls = calls
        self._returner = returner
        self._reader = reader
        self._timeout = timeout
        self._liveness = Liveness(
            agreed.terms, calls=calls, returner=returner, reader=reader, timeout=timeout
        )
        self._answers = Answers(
            agreed.terms,
            agreed.profile,
            reader=reader,
            liveness=self._liveness,
            returner=returner,
        )
        self._closed = False

    @property
    def teacher(self) -> TeacherProfile:
        """What the teacher says of itself."""
        return self.terms.teacher

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every check of the handshake: passed, or unchecked where its data was not given."""
        return self.terms.checks

    @property
    def transports(self) -> dict[str, Transport | None]:
        """The settled transport of each writer, by its id."""
        return {s.writer_id: s.transport for s in self.terms.settlements}

    @property
    def transport(self) -> Transport | None:
        """The transport that all writers share; None where they do not."""
        settled = set(self.transports.values())
        return settled.pop() if len(settled) == 1 else None

    def score(
        self,
        input_ids: Rows,
        lengths: Numbers | None = None,
        *,
        prefix_ids: Rows | None = None,
        prefix_lengths: Numbers | None = None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
        bad_rows: Literal["reject", "mask"] = "reject",
        timeout: float | None = None,
    ) -> ScoreFuture:
        """Have the teacher score rows of token ids; returns at once.

        Args:
            input_ids: integers [N,S], or a list of N rows without padding.
            lengths: true tokens of each row of a rectangle; all S where not given.
            prefix_ids, prefix_lengths: tokens that only the teacher sees, in front of each
                row; positions count from the student's own first token.
            windows: [N,2], first position and count wanted of each row; all where not given.
            bad_rows: what to do about rows with a NaN or +inf: fail, or mask the row.
            timeout: seconds until the request is given up; the server's ``default_wait``
                where not given.

        Raises:
            PayloadInvalidError: rows that no server would score, before anything is sent.
            SessionExpiredError, EpochChangedError: the session has ended.
        """
        self._check()
        if bad_rows not in ("reject", "mask"):
            raise PayloadInvalidError(
                f"bad_rows={bad_rows!r} is no policy: give 'reject' or 'mask'",
                facts={"bad_rows": str(bad_rows)},
            )
        seconds = self._seconds(timeout)
        batch = make_row_batch(
            input_ids,
            lengths,
            prefix_ids=prefix_ids,
            prefix_lengths=prefix_lengths,
            windows=windows,
            vocabulary_size=self.terms.vocabulary_size,
            prefix_vocabulary_size=self.teacher.vocabulary_size,
        )
        self._check_size(batch)
        pending = self._calls.score(
            self._scoring(batch, mask_bad_rows=bad_rows == "mask"),
            what=f"the scores of {batch.rows.row_count} rows with {batch.token_count} tokens",
            timeout=seconds,
        )
        self._answers.expect(pending)
        return ScoreFuture(
            self._answers, pending, batch, reject_bad_rows=bad_rows == "reject", owner=self
        )

    def acquire(
        self,
        *,
        payload_id: str,
        input_ids: Rows | None = None,
        lengths: Numbers | None = None,
        windows: torch.Tensor | Sequence[Sequence[int]] | None = None,
        timeout: float | None = None,
    ) -> LeasedPayload:
        """Lease a payload that another session has scored and still leases.

        With the rows that were scored (see ``score``), the payload is compared with them.

        Raises:
            PayloadRetiredError: nobody leases it any more.
            AlignmentError: it is about other rows than those given.
        """
        self._check()
        seconds = self._seconds(timeout)
        until = time.monotonic() + seconds
        batch = None
        if input_ids is not None:
            batch = make_row_batch(
                input_ids,
                lengths,
                windows=windows,
                vocabulary_size=self.terms.vocabulary_size,
                prefix_vocabulary_size=self.teacher.vocabulary_size,
            )
        way = self._reader.line or self._calls
        request_id = secrets.token_hex(12)
        with self._answers.asking(request_id):
            lease = way.acquire(
                self.terms.session_id,
                request_id=request_id,
                payload_id=payload_id,
                timeout=seconds,
            )
        return self._answers.open(lease, until=until, batch=batch, reject_bad_rows=False)

    def close(self) -> None:
        """End the session; twice is fine, and in a forked child nothing happens.

        Open leases stay good, and so does the memory of views: what the session holds, here
        and on the server, is let go with the last of them.
        """
        if self._closed or not self._returner.is_here:
            return
        self._closed = True
        self._answers.give_up_all()
        self._liveness.end()
        if not self._returner.wait(self._timeout):
            _log.warning(
                "session %s: the server did not hear of its end within %.3g s",
                self.terms.session_id,
                self._timeout,
            )

    def __enter__(self) -> Session:
        self._check()
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
        self._liveness.end()
        warnings.warn(
            f"session {self.terms.session_id} was dropped without being closed: use it in a "
            "`with` block",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def __reduce__(self) -> NoReturn:
        refuse_to_travel("session")

    def __repr__(self) -> str:
        transport = self.transport.value if self.transport else "several transports"
        return f"<Session {self.terms.session_id} ({'closed' if self._closed else transport})>"

    def _check(self) -> None:
        self._answers.check_here()
        if self._closed:
            raise SessionExpiredError(
                f"session {self.terms.session_id} was closed by this client; open a new one",
                facts={"session_id": self.terms.session_id},
            )
        self._liveness.check()

    def _scoring(self, batch: RowBatch, *, mask_bad_rows: bool) -> Scoring:
        return Scoring(
            session_id=self.terms.session_id,
            request_id=secrets.token_hex(12),
            input_ids=batch.ids_bytes,
            row_lengths=batch.rows.lengths.tolist(),
            prefix_ids=batch.prefix_bytes,
            prefix_lengths=batch.prefix.lengths.tolist() if batch.prefix else (),
            row_windows=batch.windows.flatten().tolist() if batch.has_windows else (),
            mask_bad_rows=mask_bad_rows,
        )

    def _seconds(self, timeout: float | None) -> float:
        default = self._answers.default_seconds
        return default if timeout is None else check_timeout(timeout, what="a call")

    def _check_size(self, batch: RowBatch) -> None:
        limit = self.terms.max_request_tokens
        if batch.token_count > limit:
            raise PayloadInvalidError(
                f"the request holds {batch.token_count} tokens, and the server takes {limit} at "
                "a time: send fewer rows a request, or raise --max-request-tokens on the server",
                facts={"tokens": batch.token_count, "limit": limit},
            )
