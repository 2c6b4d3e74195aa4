"""Telling that a server is ready: to scripts and supervisors, by a descriptor or a file.

One line of JSON, the same that the log's ``ready`` event holds:

    {"address": "unix:/run/...", "addresses": [...], "broker": "...", "teacher_id": "...",
     "teacher_ids": [...], "vocabulary_size": 49152, "pool_bytes": 1073741824,
     "transports": [...], "epoch": "...", "pid": 4711, "replicas": 0, "metrics": "127.0.0.1:9464"}

``teacher_id`` and ``vocabulary_size`` are those of the first of ``teacher_ids``, the teachers that
the server runs itself; empty, and 0, where it runs none. ``replicas`` counts those of ``--engine
ray``, of all teachers together, which are all ready when the server is. ``metrics`` is where
Prometheus scrapes it, and empty where nobody may. The file appears whole or not at all, and is gone
when the server stops.

systemd is told too, where it asks (``Type=notify``): ``READY=1``, and ``STOPPING=1`` at a drain.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError
from teacher_logits_server.config import notify_socket

if TYPE_CHECKING:
    from teacher_logits_server.config import ServerConfig

READY, STOPPING = "READY=1", "STOPPING=1"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What a ready server says of itself; ``address`` is the first of ``addresses``."""

    address: str
    addresses: tuple[str, ...]
    broker: str
    teacher_id: str
    teacher_ids: tuple[str, ...]
    vocabulary_size: int
    pool_bytes: int
    transports: tuple[str, ...]
    epoch: str
    pid: int
    replicas: int = 0
    metrics: str = ""

    def to_json(self) -> str:
        """Return one line of JSON, without its end."""
        return json.dumps(asdict(self))


def announce(readiness: Readiness, config: ServerConfig) -> None:
    """Write the line wherever the config names, and tell systemd.

    Raises:
        ConfigError: the descriptor or the file cannot be written.
    """
    line = f"{readiness.to_json()}\n".encode()
    if config.ready_file:
        draft = f"{config.ready_file}.{os.getpid()}"
        try:
            with open(draft, "wb") as file:
                file.write(line)
            os.replace(draft, config.ready_file)
        except OSError as error:
            with suppress(OSError):
                os.unlink(draft)
            raise _unwritable("--ready-file", config.ready_file, error) from error
    if config.ready_fd is not None:
        try:
            os.write(config.ready_fd, line)
            os.close(config.ready_fd)
        except OSError as error:
            raise _unwritable("--ready-fd", str(config.ready_fd), error) from error
    tell_systemd(READY)


def tell_systemd(state: str) -> None:
    """Say ``READY`` or ``STOPPING`` to systemd (sd_notify); nothing where nobody asked.

    A socket that cannot be reached was inherited, and is somebody else's: nothing fails by it.
    """
    path = notify_socket()
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as line:
            line.sendto(state.encode(), address)
    except OSError as error:
        _log.debug("systemd not told", extra={"facts": {"state": state, "error": str(error)}})


def retract(config: ServerConfig) -> None:
    """Remove the file, of this server or of one that died; it need not be there.

    Raises:
        ConfigError: it is there and cannot be removed.
    """
    if not config.ready_file:
        return
    try:
        os.unlink(config.ready_file)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unwritable("--ready-file", config.ready_file, error) from error


def _unwritable(flag: str, value: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag} {value} cannot be written: {error.strerror}", facts={"flag": flag, "value": value}
    )
