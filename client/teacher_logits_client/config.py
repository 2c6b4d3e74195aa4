"""What a client is told: where the server is, how long things may take, how memory is mapped.

What is no address (``addresses``), and a TCP address beyond this host that was not allowed by
``insecure=True``, are refused before anything is tried.
"""

from __future__ import annotations

import enum
import os

from teacher_logits.addresses import Address, check_path, read_address
from teacher_logits.errors import ConfigError

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
    if isinstance(address, os.PathLike):
        return Address(path=check_path(text, what="address"))
    where = read_address(text, what="address")
    if not where.is_unix and not where.port:
        raise ConfigError(
            f"address {text!r} has port 0; a server's own goes from 1 to 65535",
            facts={"address": text},
        )
    if not insecure and not where.is_loopback:
        raise ConfigError(
            f"address {text!r} is not on this host, and token ids and scores would travel "
            "unencrypted: pass insecure=True if the network is yours alone",
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
