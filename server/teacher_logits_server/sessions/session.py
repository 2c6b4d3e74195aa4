"""A session: what is kept of one student rank or publisher, and where it stands in its life.

Plain record and words; ``Sessions`` alone changes it, under the ledger's lock.
"""

from __future__ import annotations

import enum
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import NotAllowedError
from teacher_logits.profiles import TeacherProfile
from teacher_logits.protocol import FIRST_RELEASE
from teacher_logits_server.requests import Requests
from teacher_logits_server.settlement.proofs import NOTHING_PROVEN, Line, Proof

if TYPE_CHECKING:
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.protocol import Agreed
    from teacher_logits.terms import Check
    from teacher_logits.transport import Refusal, Settlement


class Phase(enum.Enum):
    """Where a session stands in its life."""

    OPENING = "opening"
    LOCAL = "local"
    REMOTE = "remote"
    CLOSED = "closed"
    DIED = "died"
    ENDED = "ended"

    @property
    def is_leaving(self) -> bool:
        """Whether there are no new leases, and those that are out are awaited."""
        return self in (Phase.CLOSED, Phase.DIED)


@dataclass(kw_only=True)
class Session:
    """One student rank or publisher, as the table keeps it. Only the table changes it.

    A publisher has a teacher's profile. ``settlements`` are by writer; ``has_shared``: so it was.
    """

    session_id: str
    request_id: str
    nonce: bytes = field(repr=False)
    profile: StudentProfile | TeacherProfile
    teacher_id: str
    checks: tuple[Check, ...]
    vocabulary_size: int
    opened_at: float
    heard_at: float
    #: Until when a call that settles it may wait: it does not lapse before that.
    awaited_until: float = 0.0
    phase: Phase = Phase.OPENING
    nonce_shown: bool = False
    #: Whose it is, where the server asks for tokens.
    owner: str = field(default="", repr=False)
    #: What calls that name it have to show; empty where it never said that they would.
    secret: str = field(default="", repr=False)
    line: Line | None = None
    #: Its line while it had one: the process and the page are there after the line's end.
    last_line: Line | None = None
    line_refusal: Refusal | None = None
    proof: Proof = NOTHING_PROVEN
    settlements: dict[str, Settlement] = field(default_factory=dict)
    has_shared: bool = False
    #: Writers whose settlement went out in an answer that was given up.
    untold: set[str] = field(default_factory=set)
    #: Whether somebody waits for its seat.
    is_contested: bool = False
    agreed: Agreed = FIRST_RELEASE
    requests: Requests = field(default_factory=Requests)

    def check_caller(self, *, owner: str, secret: str) -> None:
        """Refuse a call that is not from this session's client.

        Raises:
            NotAllowedError: another caller opened it, or its secret is missing or wrong.
        """
        self.check_owner(owner)
        if self.secret and not hmac.compare_digest(secret.encode(), self.secret.encode()):
            why = "its calls show the secret that came over its broker line, and this one does not"
            raise _not_yours(why, "SESSION_SECRET_WRONG" if secret else "SESSION_SECRET_MISSING")

    def check_owner(self, owner: str) -> None:
        """Refuse a caller who did not open this session (``NotAllowedError``)."""
        if not hmac.compare_digest(owner, self.owner):
            raise _not_yours("another caller opened it", "OTHERS_SESSION")

    @property
    def is_publisher(self) -> bool:
        """Whether it writes payloads instead of reading them."""
        return isinstance(self.profile, TeacherProfile)

    @property
    def kind(self) -> str:
        """``publisher`` or ``student``."""
        return "publisher" if self.is_publisher else "student"

    @property
    def student(self) -> StudentProfile:
        """What its student says of itself; a publisher's is refused (``NotAllowedError``)."""
        if isinstance(self.profile, TeacherProfile):
            raise _not_for("publisher", "open a student's session to read payloads")
        return self.profile

    @property
    def publisher(self) -> TeacherProfile:
        """What its publisher says of itself; a student's is refused (``NotAllowedError``)."""
        if not isinstance(self.profile, TeacherProfile):
            raise _not_for("student", "open a publisher's to write payloads")
        return self.profile

    @property
    def shares_memory(self) -> bool:
        """Whether it looks into slabs, so that room needs proof before reuse."""
        return self.has_shared or any(map(self.shares, self.settlements))

    def shares(self, writer_id: str) -> bool:
        """Say whether it looks into the slabs of a writer."""
        settlement = self.settlements.get(writer_id)
        transport = settlement.transport if settlement is not None else None
        return transport is not None and transport.is_local

    @property
    def liveness(self) -> str:
        """How its end is learnt: ``line``, or ``ttl``."""
        return "line" if self.line is not None and self.shares_memory else "ttl"


def _not_yours(why: str, reason: str) -> NotAllowedError:
    return NotAllowedError(
        f"the session that was named is not the caller's: {why}; open one", facts={"reason": reason}
    )


def _not_for(kind: str, way_out: str) -> NotAllowedError:
    return NotAllowedError(f"this is a {kind}'s session; {way_out}", facts={"kind": kind})
