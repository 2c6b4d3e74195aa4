"""Access: who may make a call, asked of every one before anything of it is read.

    without --token-file    whoever may connect: who reaches the socket's folder, has a certificate
                            that --tls-client-ca signed, or reaches a TCP port that asks for none
    with it                 who shows a token of the file, for the calls of its roles (``roles``)

A call that names a session is its owner's alone: it shows the same token, or another one of that
name, as the call that opened it; and, where the session said that it would, the secret that came
over its broker line, which no process gets that may not connect there. One whose caller has no
token left ends (``services.dismissal``).
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import NotAllowedError, UnknownCallerError
from teacher_logits.keys import SESSION_SECRET_KEY
from teacher_logits.reloading import Reloading
from teacher_logits_server.access.roles import (
    NAMES_ITS_OWN_SESSION,
    OPEN_TO_ALL,
    role_names,
    roles_of,
)
from teacher_logits_server.access.tokens import Caller, read_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits_server.access.tokens import Tokens

_log = logging.getLogger(__name__)

_BEARER = "bearer "
ANYBODY = Caller()
"""Whoever may connect, where no tokens are asked for."""

_calling: ContextVar[Caller] = ContextVar("teacher_logits_caller", default=ANYBODY)


class SessionOwners(Protocol):
    """Knows whose sessions are; the ledger."""

    def check_caller(self, session_id: str, *, owner: str, secret: str) -> None:
        """Let a call speak for a session, or raise ``NotAllowedError``."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A call that was let in: who makes it, and the secret of a session that it shows."""

    caller: Caller
    secret: str = field(default="", repr=False)


class Access:
    """Lets calls in, or refuses them.

    Args:
        tokens: those of ``--token-file``; None where the server asks for none.
    """

    def __init__(self, tokens: Reloading[Tokens] | None = None) -> None:
        self._tokens = tokens
        self._owners: SessionOwners | None = None

    def ask(self, owners: SessionOwners) -> None:
        """Ask these for whose a session is, from now on."""
        self._owners = owners

    def enter(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Entry:
        """Let a call in.

        Raises:
            UnknownCallerError: it shows no token, or none of the file.
            NotAllowedError: it is for other roles.
        """
        if method in OPEN_TO_ALL:
            return Entry(caller=ANYBODY)
        shown = {key: value for key, value in metadata if isinstance(value, str)}
        secret = shown.get(SESSION_SECRET_KEY, "")
        if self._tokens is None:
            return Entry(caller=ANYBODY, secret=secret)
        caller, allowed = _find(self._tokens.current(), shown), roles_of(method)
        if caller.roles.isdisjoint(allowed):
            raise NotAllowedError(
                f"{method} is for the role {role_names(allowed)}, and the token shown has "
                f"{role_names(caller.roles)}: --token-file gives roles",
                facts={
                    "reason": "ROLE_LACKING",
                    "method": method,
                    "roles": role_names(caller.roles),
                    "caller": caller.name,
                },
            )
        return Entry(caller=caller, secret=secret)

    def check(self, entry: Entry, method: str, message: object) -> None:
        """Refuse a call that names somebody else's session.

        Raises:
            NotAllowedError: another caller opened it, or its secret is missing or wrong.
        """
        session_id = getattr(message, "session_id", "")
        if session_id and self._owners is not None and method in NAMES_ITS_OWN_SESSION:
            owner = entry.caller.owner
            self._owners.check_caller(session_id, owner=owner, secret=entry.secret)

    def kinds(self) -> Mapping[str, frozenset[str]] | None:
        """Return by owner of which kinds its sessions may be, now; None where anybody may call."""
        return None if self._tokens is None else self._tokens.current().kinds

    def act(self, entry: Entry) -> None:
        """Have this task act for the caller; see ``owner``."""
        _calling.set(entry.caller)


def access_of(token_file: str) -> Access:
    """Return who may call by a file of tokens; anybody where its path is empty.

    Raises:
        ConfigError: see ``tokens.read_tokens``.
    """
    if not token_file:
        return Access()
    read = partial(read_tokens, token_file)
    return Access(Reloading([token_file], read, on_failure=_tell, on_change=_taken))


def _tell(error: TeacherLogitsError) -> None:
    facts = {"error": error.message}
    _log.error("new tokens not taken, the old ones go on", extra={"facts": facts})


def _taken(tokens: Tokens) -> None:
    _log.info("new tokens taken", extra={"facts": {"tokens": len(tokens)}})


def owner() -> str:
    """Return whose the sessions are that the call at hand opens."""
    return _calling.get().owner


def _find(tokens: Tokens, shown: dict[str, str]) -> Caller:
    header = shown.get("authorization", "")
    if header[: len(_BEARER)].lower() != _BEARER:
        raise UnknownCallerError(
            "the server asks for a token, and none was shown: connect with token_file=... "
            "(--token-file), or set TEACHER_LOGITS_TOKEN_FILE",
            facts={"reason": "TOKEN_MISSING"},
        )
    caller = tokens.find(header[len(_BEARER) :].strip())
    if caller is None:
        raise UnknownCallerError(
            "the token that was shown is none of the server's: is it the newest, and for this "
            "server?",
            facts={"reason": "TOKEN_UNKNOWN"},
        )
    return caller
