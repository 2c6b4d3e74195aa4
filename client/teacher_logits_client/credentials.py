"""Credentials: what a client shows of itself, and whom it believes.

Refuses, before anything is sent, what would show a token to whoever listens: one goes over a Unix
socket or TLS, or where ``insecure=True`` was said. A token is in no message and no repr.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.addresses import is_host_name
from teacher_logits.errors import ConfigError, TeacherLogitsError
from teacher_logits.reloading import Reloading
from teacher_logits.secret_files import read_file_bytes, read_secret_bytes, read_secret_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.addresses import Address

_TOKEN = re.compile(r"[!-~]+\Z")
_log = logging.getLogger("teacher_logits_client")


@dataclass(frozen=True, kw_only=True)
class Tls:
    """TLS of a connection over TCP. Files are PEM, and are read as the client connects.

    Args:
        ca: file of those who may have signed the server's certificate; the machine's where None.
        cert, key: files of this client's own certificate and its key, for a server that asks for
            one (mutual TLS).
        server_name: the name that the server's certificate has to have; the address's where None.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Refuse a certificate without its key, or the reverse (``ConfigError``)."""
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, str | os.PathLike | None):
                raise _refused(f"Tls({each.name}=) takes text or a path, not {value!r:.80}")
        if (self.cert is None) != (self.key is None):
            raise _refused("Tls(cert=...) and Tls(key=...) go together: give both")
        if self.server_name and not is_host_name(self.server_name):
            raise _refused(f"tls: server_name {self.server_name[:80]!r} is no host's name")

    def context(self) -> ssl.SSLContext:
        """Return what Python makes a connection of this kind with.

        Raises:
            ConfigError: a file cannot be read, or is not what it should be; the key's is open to
                other users.
        """
        self._key_bytes()
        _bytes(self.ca, what="tls_ca")
        _bytes(self.cert, what="tls_cert")
        context = ssl.create_default_context()
        context.set_alpn_protocols(["h2"])
        try:
            if self.ca is not None:
                context = ssl.create_default_context(cafile=os.fspath(self.ca))
                context.set_alpn_protocols(["h2"])
        except (OSError, ValueError) as error:
            raise _refused(f"tls: ca {self.ca}: no certificates in PEM: {_said(error)}") from error
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise _refused(
                f"tls: cert {self.cert}, key {self.key}: no certificate and its key in PEM, "
                f"without a password: {_said(error)}"
            ) from error
        return context

    def contents(self) -> TlsContents:
        """Return what the files hold, checked; raises as ``context`` does."""
        self.context()
        ca = self.ca if self.ca is not None else ssl.get_default_verify_paths().cafile
        return TlsContents(
            ca=_bytes(ca, what="tls_ca"),
            key=self._key_bytes(),
            cert=_bytes(self.cert, what="tls_cert"),
        )

    def _key_bytes(self) -> bytes | None:
        return None if self.key is None else read_secret_bytes(os.fspath(self.key), what="tls_key")


@dataclass(frozen=True, kw_only=True)
class TlsContents:
    """What the files of a ``Tls`` hold; None for what was not given."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """How a client connects to one server: with TLS or without, and which token it shows.

    ``token`` returns the token of the moment; empty where there is none.
    """

    tls: Tls | None = None
    token: Callable[[], str] = field(default=str, repr=False)


NO_CREDENTIALS = Credentials()


def check_token(token: str) -> str:
    """Return a token that a call can show.

    Raises:
        ConfigError: it is no text, or has spaces or characters beyond ASCII.
    """
    if not isinstance(token, str) or not _TOKEN.match(token):
        raise _refused("the token is none: it is text without spaces, printable and ASCII")
    return token


def token_of_file(path: str) -> Callable[[], str]:
    """Return what reads the token of a file, anew when the file changes.

    Raises:
        ConfigError: the file cannot be read, is open to other users, or holds no token.
    """
    read, taken = partial(_read_token, path), partial(_taken, path)
    kept = Reloading([path], read, on_failure=_tell, on_change=taken)
    return kept.current


def check_token_is_safe(address: Address, credentials: Credentials, *, insecure: bool) -> None:
    """Refuse to show a token where others could read it (``ConfigError``)."""
    if address.is_unix or credentials.tls is not None or insecure or not credentials.token():
        return
    raise ConfigError(
        f"a token would travel to {str(address)!r} unencrypted, and another program may listen "
        "there: connect with tls=Tls(ca=...) (--tls-ca), or pass insecure=True (--insecure) if the "
        "network is yours alone",
        facts={"address": str(address), "reason": "TOKEN_IN_THE_OPEN"},
    )


def _read_token(path: str) -> str:
    words = read_secret_file(path, what="token_file").split()
    if len(words) != 1:
        raise _refused(f"token_file {path} holds {len(words)} words: one token is expected")
    try:
        return check_token(words[0])
    except ConfigError as error:
        raise _refused(f"token_file {path}: {error.message}") from None


def _bytes(path: str | os.PathLike[str] | None, *, what: str) -> bytes | None:
    return None if path is None else read_file_bytes(os.fspath(path), what=what)


def _no_password() -> str:
    raise ValueError("the key has a password")


def _said(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _tell(error: TeacherLogitsError) -> None:
    _log.warning("the new token was not taken, the old one goes on: %s", error.message)


def _taken(path: str, token: str) -> None:
    _log.info("a new token of %s was taken", path)


def _refused(message: str) -> ConfigError:
    return ConfigError(message)
