"""The connection to a Ray cluster: one a process, however many ask for it.

Whoever joins first connects, whoever leaves last disconnects; a process that was connected before
stays so. Every actor of ours ends with the process that made it, or when that disconnects.

Refuses (``ConfigError``, naming ``--ray-address``) an address where no cluster answers within
seconds: Ray would try for minutes, and then end the process.
"""

from __future__ import annotations

import logging
import socket
import threading

import ray

from teacher_logits.errors import ConfigError
from teacher_logits_server.ray_address import AUTO, check_listening, no_cluster, refused

_lock = threading.Lock()
_joined: list[Connection] = []


class Connection:
    """One user's share in the process's connection; ``close`` gives it back."""

    def __init__(self, *, owned: bool) -> None:
        self._owned = owned

    @property
    def address(self) -> str:
        """Where the cluster's control service listens."""
        return str(ray.get_runtime_context().gcs_address)

    @property
    def node_id(self) -> str:
        """The cluster's node that this process runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def close(self) -> None:
        """Leave; the last one to do so disconnects. Twice is fine."""
        with _lock:
            if self not in _joined:
                return
            _joined.remove(self)
            if self._owned and not _joined:
                ray.shutdown()


def join(*, address: str, namespace: str) -> Connection:
    """Connect this process to a cluster, or share in the connection that it has.

    Args:
        address: ``host:port``, or ``auto`` for the cluster that runs on this machine.

    Raises:
        ConfigError: none answers there, or one of another release; or this process has joined
            another one.
    """
    with _lock:
        if not ray.is_initialized():
            _connect(address, namespace)
            owned = True
        else:
            _check_same(address)
            owned = bool(_joined) and _joined[0]._owned
        made = Connection(owned=owned)
        _joined.append(made)
        return made


def _connect(address: str, namespace: str) -> None:
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        check_listening(address)
        if address == AUTO:  # a file may name a cluster that is gone
            check_listening(address, found=canonicalize_bootstrap_address_or_die(address))
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())[:300]
        raise no_cluster(address, f"{type(error).__name__}: {said}") from error


def _check_same(address: str) -> None:
    there = str(ray.get_runtime_context().gcs_address)
    if address != AUTO and _place(address) != _place(there):
        raise refused(
            address, f"this process has joined the cluster at {there}: give that, or {AUTO}"
        )


def _place(address: str) -> tuple[str, str]:
    """Return an address's host, by number where it has one, and its port."""
    host, _, port = address.rpartition(":")
    try:
        return socket.gethostbyname(host.strip("[]")), port
    except OSError:
        return host, port
