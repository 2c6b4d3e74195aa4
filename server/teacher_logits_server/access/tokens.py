"""Tokens: who may call, by what they show; a file of them, one a line.

    # roles            token, or sha256: and the hex digest of one      name (if any)
    student            GkX0cW1yqvVYkS2mR9bD7w                           trainer-a
    publisher          sha256:5e884898da28047151d0e56f8d...             teacher-pool
    operator,student   4fUq9cHnE0vXl1sQ8yTz3A

Promises: a token is compared with every line of the file, digest by digest, in constant time;
neither a token nor its digest is in a message, a log or a repr. Lines that have one name are one
caller, so that an old token and a new one may stand beside each other.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError, RequestInvalidError
from teacher_logits.keys import check_name
from teacher_logits.secret_files import read_secret_file
from teacher_logits_server.access.roles import EVERY_ROLE, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

FLAG = "--token-file"
MIN_TOKEN_CHARS = 16
_TOKEN = re.compile(r"[!-~]+\Z")  # a header of gRPC takes no other characters
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})\Z", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who makes a call: the roles it has, and the name that its sessions are kept under.

    ``owner`` is the same for all tokens of a name; empty where the server asks for no tokens.
    """

    name: str = ""
    roles: frozenset[Role] = EVERY_ROLE
    owner: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    caller: Caller
    digest: bytes = field(repr=False)


class Tokens:
    """The callers that a server knows."""

    def __init__(self, entries: tuple[_Entry, ...]) -> None:
        self._entries = entries
        kinds: dict[str, frozenset[str]] = {}
        for each in entries:
            owner = each.caller.owner
            kinds[owner] = kinds.get(owner, frozenset()) | {r.value for r in each.caller.roles}
        #: The names of the roles that each owner has, by all of its tokens.
        self.kinds: Mapping[str, frozenset[str]] = kinds

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, token: str) -> Caller | None:
        """Return whose token this is, or None; takes as long whichever it is."""
        shown = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        found = None
        for entry in self._entries:
            if hmac.compare_digest(shown, entry.digest):
                found = entry.caller
        return found


def read_tokens(path: str) -> Tokens:
    """Read a file of tokens.

    Raises:
        ConfigError: it cannot be read, others can read it, or a line of it makes no sense; the
            line is named by its number.
    """
    entries: list[_Entry] = []
    for number, line in enumerate(read_secret_file(path, what=FLAG).splitlines(), start=1):
        words = line.split()
        if words and not words[0].startswith("#"):
            entries.append(_entry(words, where=f"{FLAG} {path}, line {number}"))
    digests = [entry.digest for entry in entries]
    if len(set(digests)) != len(digests):
        raise _refused(f"{FLAG} {path}", "the same token stands on two lines")
    if not entries:
        raise _refused(f"{FLAG} {path}", "it holds no token, and nobody could call")
    return Tokens(tuple(entries))


def _entry(words: list[str], *, where: str) -> _Entry:
    if len(words) not in (2, 3):
        raise _refused(where, "give roles, a token (or sha256: and its digest), and a name if any")
    roles, shown = _roles(words[0], where=where), words[1]
    hashed = _DIGEST.match(shown)
    if hashed is not None:
        digest = bytes.fromhex(hashed[1])
    elif shown.lower().startswith("sha256:"):
        raise _refused(where, "sha256: is followed by 64 hexadecimal digits")
    elif len(shown) < MIN_TOKEN_CHARS or not _TOKEN.match(shown):
        raise _refused(
            where, f"a token has at least {MIN_TOKEN_CHARS} characters, printable and ASCII"
        )
    else:
        digest = hashlib.sha256(shown.encode()).digest()
    name = words[2] if len(words) == 3 else ""
    try:
        owner = f"name:{check_name(name, what='name')}" if name else f"token:{digest.hex()}"
    except RequestInvalidError as error:
        rule = error.message.rpartition("is not a name: ")[2]
        # It is not shown: who writes a name before the token has the token here.
        raise _refused(where, f"the third word is not a name: {rule}") from None
    return _Entry(digest=digest, caller=Caller(name=name, roles=roles, owner=owner))


def _roles(text: str, *, where: str) -> frozenset[Role]:
    try:
        return frozenset(Role(name) for name in text.split(","))
    except ValueError:
        names = ", ".join(role.value for role in Role)
        raise _refused(where, f"the roles are {names}, with commas between several") from None


def _refused(where: str, rule: str) -> ConfigError:
    return ConfigError(f"{where}: {rule}", facts={"flag": FLAG})
