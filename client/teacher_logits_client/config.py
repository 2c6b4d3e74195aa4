"""What a client is told: where the server is, how long things may take, how memory is mapped.

An address is ``unix:/path``, an absolute path alone, or ``host:port``; a path that the kernel
could not take, and a TCP address beyond this host that was not allowed by ``insecure=True``,
are refused before anything is tried.
"""

from __future__ import annotations

import enum
import ipaddress
import os
from dataclasses import dataclass

from teacher_logits.errors import ConfigError

UNIX = "unix:"
MAX_PATH_BYTES = 107
"""``sun_path`` has 108 bytes, and a path ends with a zero byte."""

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
class Address:
    """Where a server is: ``path`` of a Unix socket, else ``host`` and ``port``."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def target(self) -> str:
        """The address as gRPC takes it."""
        return str(self) if self.path else f"dns:///{self}"

    def __str__(self) -> str:
        if self.path:
            return f"{UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(address: str | os.PathLike[str], *, insecure: bool = False) -> Address:
    """Read an address; a path object, and text that starts with ``/``, name a Unix socket.

    Raises:
        ConfigError: it is none, its path is relative or over 107 bytes, or it is not on
            this host and ``insecure`` is False.
    """
    if not isinstance(address, str | os.PathLike):
        raise ConfigError(
            f"an address was given as {type(address).__name__}: give unix:/absolute/path or "
            "host:port as text, or the path of a Unix socket",
            facts={"given": type(address).__name__},
        )
    text = os.fsdecode(address)
    if isinstance(address, os.PathLike) or text.startswith(("/", UNIX)):
        return Address(path=_socket_path(text))
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or not port.isdecimal() or (":" in bare and bare == host) or "/" in bare:
        raise ConfigError(
            f"address {text!r} is none: give unix:/absolute/path, host:port or [v6]:port",
            facts={"address": text},
        )
    if not 1 <= int(port) <= 65535:
        raise ConfigError(
            f"address {text!r} has port {port}; ports go from 1 to 65535",
            facts={"address": text, "port": int(port)},
        )
    if not insecure and not _is_loopback(bare):
        raise ConfigError(
            f"address {text!r} is not on this host, and token ids and scores would travel "
            "unencrypted: pass insecure=True if the network is yours alone",
            facts={"address": text},
        )
    return Address(host=bare, port=int(port))


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


def _socket_path(text: str) -> str:
    # gRPC also writes unix:///path.
    path = text.removeprefix(UNIX)
    path = path[2:] if path.startswith("///") else path
    if not os.path.isabs(path) or "\0" in path or path.endswith("/"):
        raise ConfigError(
            f"address {text!r} does not name a socket by its absolute path",
            facts={"address": text},
        )
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path!r} has {length} bytes, and the kernel takes at most "
            f"{MAX_PATH_BYTES}: have the server listen in a shorter folder",
            facts={"length_bytes": length, "limit_bytes": MAX_PATH_BYTES},
        )
    return path


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
