"""Who may connect, and as what: a group of ``settings``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from teacher_logits_server import readers
from teacher_logits_server.flags import setting as _set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.addresses import Address


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """who may connect"""

    insecure: bool = _set(
        False,
        "--insecure",
        readers.SWITCH,
        "allow TCP without TLS: nothing is encrypted, and whoever reaches the port may use the "
        "teacher, which on 127.0.0.1 is every user of this machine",
    )
    tls_cert: str = _set(
        "",
        "--tls-cert",
        readers.PATH,
        "certificate of this server and those that signed it (PEM), for its TCP addresses; read "
        "anew when it changes, as the next two are",
    )
    tls_key: str = _set(
        "",
        "--tls-key",
        readers.PATH,
        "private key of --tls-cert (PEM); other users must not be able to read it",
    )
    tls_client_ca: str = _set(
        "",
        "--tls-client-ca",
        readers.PATH,
        "let in over TCP only who shows a certificate that one of these signed (PEM): mutual TLS",
    )
    token_file: str = _set(
        "",
        "--token-file",
        readers.PATH,
        "let in only who shows a token of this file, over Unix sockets too: a line each of roles "
        "(student, publisher, operator; commas between several), token or sha256:DIGEST, and a "
        "name if any; read anew when it changes; other users must not be able to read it",
    )
    socket_group: str = _set(
        "",
        "--socket-group",
        readers.NAME,
        "let this group, by name or number, connect to the Unix sockets, for containers whose "
        "users differ; the sockets' folder is made for it, and must let it in where it is there",
    )
    allow_uids: tuple[int, ...] = _set(
        (),
        "--allow-uid",
        readers.UID,
        "let this user's processes map the shared memory, besides the server's own user and "
        "root; without --socket-group the sockets are then open to all who reach their folder",
        repeated=True,
    )


class _Told(Protocol):
    """What the rule below needs of a server's settings."""

    @property
    def addresses(self) -> Sequence[Address]: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_client_ca(self) -> str: ...
    @property
    def allow_uids(self) -> tuple[int, ...]: ...


def broken_rule(config: _Told) -> tuple[str, object, str] | None:
    """Return the first setting that makes no sense: its field, value, and the rule."""
    if bool(config.tls_cert) != bool(config.tls_key):
        given, lacking = "tls_cert", "--tls-key"
        if config.tls_key:
            given, lacking = "tls_key", "--tls-cert"
        return given, getattr(config, given), f"goes with {lacking}: give both"
    if config.tls_client_ca and not config.tls_cert:
        rule = "is for TLS, which takes --tls-cert and --tls-key: give them too"
        return "tls_client_ca", config.tls_client_ca, rule
    if config.tls_cert and all(each.is_unix for each in config.addresses):
        rule = "is for addresses host:port, and --listen has none: give one, or leave TLS out"
        return "tls_cert", config.tls_cert, rule
    reachable = next((each for each in config.addresses if not each.is_unix), None)
    if reachable is not None and not (config.tls_cert or config.insecure):
        who = "every user of this machine" if reachable.is_loopback else "other hosts"
        rule = (
            f"can be reached by {who}, unencrypted: give --tls-cert and --tls-key, listen on a "
            "Unix socket, or say --insecure if all who reach it may use the teacher"
        )
        return "listen", str(reachable), rule
    for uid in config.allow_uids:
        if uid < 0:
            return "allow_uids", uid, "user ids start at 0"
    return None
