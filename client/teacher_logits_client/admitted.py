"""An admitted student rank: what was agreed in the handshake, and how its session ends.

Prints nothing. Refuses to be used after its end, and in a forked child of its process. A
session that is dropped unclosed is named in a ``ResourceWarning`` and ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from teacher_logits.errors import SessionExpiredError
from teacher_logits_client.dropped import warn_dropped
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.scoring.answers import Answers
from teacher_logits_client.sessions.liveness import Liveness
from teacher_logits_client.steps import Steps, make_source
from teacher_logits_client.steps.batches import BatchMaker

if TYPE_CHECKING:
    from types import TracebackType

    from teacher_logits.profiles import StudentProfile, TeacherProfile
    from teacher_logits.terms import Check, SessionTerms
    from teacher_logits.transport import Refusal, Transport
    from teacher_logits_client.calls import Calls
    from teacher_logits_client.payloads.returns import Returner
    from teacher_logits_client.sessions.agreement import Agreed
    from teacher_logits_client.sessions.reader import Reader
    from teacher_logits_client.steps.mailbox import Mailbox

    Self = TypeVar("Self", bound="Admitted")


class Admitted:
    """A session that can be looked at and ended; ``Session`` is one that can be asked.

    ``terms`` is what the server granted, ``profile`` what was said to it, hints included.
    ``refusals`` are the wanted transports that are not on offer, with their reasons, and
    ``checks`` what became of each check of the handshake.
    """

    _closed = True
    _ended = True  # what a close does is done; one that was interrupted is done again

    def __init__(
        self,
        agreed: Agreed,
        *,
        calls: Calls,
        returner: Returner,
        reader: Reader,
        mailbox: Mailbox,
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
        self._liveness = Liveness(
            agreed.terms, calls=calls, returner=returner, reader=reader, timeout=timeout
        )
        self._answers = Answers(
            agreed.terms, agreed.profile, reader=reader, liveness=self._liveness, returner=returner
        )
        maker = BatchMaker(agreed.profile, reader=reader, returner=returner)
        source = make_source(
            self.terms, calls=calls, reader=reader, returner=returner, mailbox=mailbox, maker=maker
        )
        self._steps = Steps(
            source,
            session_id=agreed.terms.session_id,
            reader=reader,
            maker=maker,
            liveness=self._liveness,
        )
        self._closed = self._ended = False
        mailbox.hear_of_writers(reader.try_probes)
        mailbox.hear_of_gone_slabs(reader.forget_slabs)

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
        """The settled transport of each writer, by its id; publishers join as they come."""
        return self._reader.transports

    @property
    def transport(self) -> Transport | None:
        """The transport that all writers share; None where they do not."""
        settled = set(self.transports.values())
        return settled.pop() if len(settled) == 1 else None

    def close(self) -> None:
        """End the session; twice is fine, and in a forked child nothing happens.

        Open leases stay good, and so does the memory of views: what the session holds, here
        and on the server, is let go with the last of them.
        """
        if self._ended or not self._returner.is_here:
            return
        self._closed = True
        self._answers.give_up_all()
        self._steps.close()
        self._liveness.end_and_wait("session")
        self._ended = True

    def __enter__(self: Self) -> Self:
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
        if self._ended or not self._returner.is_here:
            return
        self._returner.later(self._steps.close)
        self._liveness.end()
        if not self._closed:
            warn_dropped(f"session {self.terms.session_id}", self)

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a session")

    def __repr__(self) -> str:
        transport = self.transport.value if self.transport else "several transports"
        return f"<Session {self.terms.session_id} ({'closed' if self._closed else transport})>"

    def _check(self, *, look: bool = True) -> None:
        self._answers.check_here()
        if self._closed:
            raise SessionExpiredError(
                f"session {self.terms.session_id} was closed by this client; open a new one",
                facts={"session_id": self.terms.session_id},
            )
        if look or self._reader.line is None:
            self._liveness.check()
