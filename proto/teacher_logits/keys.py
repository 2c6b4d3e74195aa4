"""Names of things: payload keys, and ids that nobody can guess.

Session, lease and payload ids carry the epoch of the server that made them, so that a
server can tell an id of an older life from one that never was.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from teacher_logits.errors import EpochChangedError, RequestInvalidError

_WAYS_OUT = {"payload": "have its rows scored again, and acquire the payload that comes of it"}
"""What to do about an id of an older epoch, by what it names; for the rest, open a new session."""

SESSION_SECRET_KEY = "teacher-logits-session"
"""Where a gRPC call shows the secret of the session that it names; see ``new_secret``."""

STEP_LIMIT = 1 << 62
"""Steps are whole numbers from 0 on, below this: numbers behind them fit the wire too."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}\Z")


@dataclass(frozen=True, kw_only=True)
class PayloadKey:
    """Names one registered payload: one teacher, one step, one shard."""

    teacher_id: str
    step: int
    shard: int


def new_epoch() -> str:
    """Return a fresh name for one life of a server."""
    return secrets.token_hex(6)


def new_id(kind: str, epoch: str) -> str:
    """Return an unguessable id (128 random bits), e.g. ``s-1f0a66b2c9de-...`` for a session."""
    return f"{kind}-{epoch}-{secrets.token_urlsafe(16)}"


def new_secret() -> str:
    """Return a secret (256 random bits) that a call can show in its metadata."""
    return secrets.token_urlsafe(32)


def check_epoch(identifier: str, epoch: str, *, what: str) -> None:
    """Refuse an id that another life of the server made.

    Raises:
        EpochChangedError: the id is well formed and of another epoch.
    """
    parts = identifier.split("-", 2)
    if len(parts) == 3 and parts[1] != epoch:
        raise EpochChangedError(
            f"{what} {identifier!r} belongs to epoch {parts[1]}, and the server is now in epoch "
            f"{epoch}: it was restarted; {_WAYS_OUT.get(what, 'open a new session')}",
            facts={"epoch": epoch, "stale_epoch": parts[1]},
        )


def check_step(step: int) -> int:
    """Return ``step`` if it can number one.

    Raises:
        RequestInvalidError: it is negative, or not below ``STEP_LIMIT``.
    """
    if not 0 <= step < STEP_LIMIT:
        raise RequestInvalidError(
            f"step {step} is none: steps are whole numbers from 0 on, below {STEP_LIMIT}",
            facts={"step": str(step), "limit": STEP_LIMIT},
        )
    return step


def check_name(name: str, *, what: str) -> str:
    """Return ``name`` if it can serve as an id that people choose.

    Raises:
        RequestInvalidError: it is empty, longer than 128 characters, or has characters
            outside letters, digits and ``._:/@-``.
    """
    if not _NAME.match(name):
        raise RequestInvalidError(
            f"{what} {name[:140]!r} is not a name: use 1 to 128 letters, digits or ._:/@-, "
            "starting with a letter or digit",
            facts={"length": len(name)},
        )
    return name


def is_text(text: str) -> bool:
    """Whether text can be sent: an argument or a path that is no UTF-8 has surrogates in it."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
