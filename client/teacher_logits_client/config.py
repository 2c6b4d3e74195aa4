"""What a client is told: where the server is, how long things may take, how memory is mapped.

What is no address (``addresses``), and a TCP address beyond this host that has neither TLS nor
``insecure=True``, are refused before anything is tried. What the caller does not say of tokens and
TLS, the environment may, which is read here alone:

    TEACHER_LOGITS_TOKEN_FILE                     as token_file=
    TEACHER_LOGITS_TLS_CA, _TLS_CERT, _TLS_KEY,   as tls=Tls(...), for TCP addresses that are not
    _TLS_SERVER_NAME                              insecure=True
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.addresses import Address, check_path, read_address
from teacher_logits.errors import ConfigError
from teacher_logits_client.credentials import (
    Credentials,
    Tls,
    check_token,
    check_token_is_safe,
    token_of_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable

TLS = "tls://"
"""Before ``host:port``: with TLS."""
_VARIABLES = "TEACHER_LOGITS_"

DEFAULT_TIMEOUT_SECONDS = 10.0
"""How long a call may take where the caller says nothing: connecting, the handshake, control."""

DEFAULT_TOLERANCE_NATS = 0.1
"""How far off a log-probability may be: values in 16 bits, and a model that computes in bf16."""

DEFAULT_BUFFER_BYTES = 1 << 30
"""How much memory of finished streams is kept for the next ones."""


class HostCopies(enum.Enum):
    """When a publisher copies what lies on its device to the host as well."""

    AS_NEEDED = "as_needed"
    ALWAYS = "always"


class MapMode(enum.Enum):
    """How a reader has the bytes of a payload that lies in memory it shares with the writer.

    ``COW``: in-place arithmetic stays with the reader; what it changed is dropped when the
    lease comes back. ``READ_ONLY``: nothing can be changed, and an in-place operation ends
    the process. ``COPY``: tensors of the reader's own, which may outlive the lease.
    ``PINNED``: as ``READ_ONLY``, in pages that a device copies from without a staging copy, for a
    student on a GPU: ``payload.columns[...].to("cuda", non_blocking=True)``. Nothing can be
    changed, and an in-place operation on a view ends the process; targets, but for their ids,
    are copies in any case.

    Over ``local`` there is no map: ``COW`` and ``READ_ONLY`` both give the writer's own
    memory, which must not be written into; nor must that of a device, over ``cuda_ipc``. Over
    ``stream`` the bytes are the reader's own in any case. Only maps are pinned.
    """

    COW = "cow"
    READ_ONLY = "read_only"
    COPY = "copy"
    PINNED = "pinned"


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A server: where it is, and how a client comes there."""

    address: Address
    credentials: Credentials

    def __str__(self) -> str:
        """The address as it is given to connect so: with ``tls://`` where that is spoken."""
        is_tls = self.credentials.tls is not None and not self.address.is_unix
        return f"{TLS if is_tls else ''}{self.address}"


def find_connection(
    address: str | os.PathLike[str],
    *,
    insecure: bool = False,
    tls: Tls | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> Connection:
    """Return where a server is, and what to show there; see ``connect`` for the arguments.

    Raises:
        ConfigError: see ``parse_address``; or what was said does not go together, a token would
            travel unencrypted, or its file cannot be used.
    """
    text, tls = _without_scheme(address, tls)
    if tls is not None and insecure:
        raise ConfigError("tls=... encrypts, and insecure=True says not to: give one of the two")
    where = parse_address(text, insecure=insecure or tls is not None or bool(_tls_said()))
    if tls is not None and where.is_unix:
        raise ConfigError(
            f"{str(where)!r} is a Unix socket, which takes no TLS: its folder says who may connect",
            facts={"address": str(where)},
        )
    if not where.is_unix and not insecure:
        tls = tls or _tls_said()
    credentials = Credentials(tls=tls, token=_token_source(token, token_file))
    check_token_is_safe(where, credentials, insecure=insecure)
    return Connection(address=where, credentials=credentials)


def _without_scheme(
    address: str | os.PathLike[str], tls: Tls | None
) -> tuple[str | os.PathLike[str], Tls | None]:
    """Take ``tls://`` off an address that has it."""
    if isinstance(address, str) and address.startswith(TLS):
        return address.removeprefix(TLS), tls or _tls_said() or Tls()
    return address, tls


def _tls_said() -> Tls | None:
    """Return what the environment says of TLS, if it does."""
    names = ("ca", "cert", "key", "server_name")
    said = {name: os.environ.get(f"{_VARIABLES}TLS_{name.upper()}") or None for name in names}
    return Tls(**said) if any(said.values()) else None


def _token_source(
    token: str | None, token_file: str | os.PathLike[str] | None
) -> Callable[[], str]:
    if token is not None and token_file is not None:
        raise ConfigError("token=... and token_file=... were both given: give one of the two")
    if token is not None:
        return partial(str, check_token(token))
    path = token_file or os.environ.get(f"{_VARIABLES}TOKEN_FILE")
    return token_of_file(os.fsdecode(path)) if path else str


def parse_address(address: str | os.PathLike[str], *, insecure: bool = False) -> Address:
    """Read an address; a path object, and text that starts with ``/``, name a Unix socket.

    Raises:
        ConfigError: it is none, its path is relative or over 107 bytes, or it is not on
            this host and ``insecure`` is False.
    """
    if not isinstance(address, str | os.PathLike):
        raise ConfigError(
            f"an address was given as {type(address).__name__}: give unix:/absolute/path, "
            f"host:port or {TLS}host:port as text, or the path of a Unix socket",
            facts={"given": type(address).__name__},
        )
    text = os.fsdecode(address)
    if isinstance(address, os.PathLike):
        return Address(path=check_path(text, what="address"))
    where = read_address(text, what="address", or_else=f"{TLS}host:port")
    if not where.is_unix and not where.port:
        raise ConfigError(
            f"address {text!r} has port 0; a server's own goes from 1 to 65535",
            facts={"address": text},
        )
    if not insecure and not where.is_loopback:
        raise ConfigError(
            f"address {text!r} is not on this host, and token ids and scores would travel "
            "unencrypted: connect with tls=Tls(ca=...) (--tls-ca), or pass insecure=True "
            "(--insecure) if the network is yours alone",
            facts={"address": text},
        )
    return where


def check_timeout(timeout: float, *, what: str) -> float:
    """Return ``timeout`` in seconds if a call can have it as its deadline.

    Raises:
        ConfigError: it is not a positive number of seconds, one day at most.
    """
    if not isinstance(timeout, int | float) or not 0 < timeout <= 86400:
        raise ConfigError(
            f"{what} has a timeout of {timeout!r} s: give more than 0 and at most 86400, "
            "since every call has a deadline",
            facts={
                "timeout_seconds": timeout if isinstance(timeout, int | float) else str(timeout)
            },
        )
    return float(timeout)
