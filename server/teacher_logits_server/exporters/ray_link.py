"""The server's end of its Ray process: started, spoken to, and ended.

The process joins a cluster before the server does anything else; where it cannot, the server is
refused its settings. Nobody here waits for Ray after that: what is to be sent goes by a thread of
its own, and what comes is told to a listener on another.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits import keys
from teacher_logits.errors import ConfigError
from teacher_logits.terms import RayHolder
from teacher_logits_server.exporters.ray_channel import Channel, number, text
from teacher_logits_server.ray_address import check_listening, no_cluster, refused
from teacher_logits_server.readers import size_setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.exporters.ray_channel import Message

_log = logging.getLogger(__name__)

JOIN_SECONDS = 45.0
"""How long a cluster may take to be joined, and to start the holder's worker."""
SILENT_SECONDS = 90.0
"""How long the process may say nothing: it looks at the store every second, and is no longer than
this with another holder. One that is silent is stopped, or hangs, and comes to one that is gone."""
END_SECONDS = 5.0
_MODULE = "teacher_logits_server.exporters.ray_process"
_DEFAULT_SHARE = 0.5
"""Part of the store that is the default budget: below Ray's spilling threshold of 0.8, with room
for what others put there."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The cluster that was joined.

    ``challenge`` is what the holder says, and ``key`` that of its tokens. ``most_bytes`` may be in
    the store of ``store_bytes`` before it spills, and ``budget_bytes`` of them be this server's.
    """

    epoch: str
    key: bytes
    holder: RayHolder
    challenge: bytes
    store_bytes: int
    most_bytes: int
    budget_bytes: int


class RayLink:
    """A Ray process that has joined a cluster, and the channel to it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, joined: Joined) -> None:
        self.joined = joined
        self._process = process
        self._channel = channel
        self._due: queue.SimpleQueue[tuple[str, int | None, dict[str, object]] | None]
        self._due = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="teacher-logits-to-ray", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def send(self, op: str, *, descriptor: int | None = None, **message: object) -> None:
        """Send a message soon; the descriptor is this link's from here on. Waits for nobody."""
        self._due.put((op, descriptor, message))

    def listen(self, hear: Callable[[Message], None], lost: Callable[[], None]) -> None:
        """Have what comes told to ``hear``, and ``lost`` called once nothing will come.

        A process that says what nobody here understands is one that is lost.
        """

        def run() -> None:
            try:
                while (received := self._channel.receive()) is not None:
                    hear(received[0])
            except Exception:
                _log.exception("the Ray process was not understood")
            finally:
                lost()

        threading.Thread(target=run, name="teacher-logits-from-ray", daemon=True).start()

    def hang_up(self) -> None:
        """Have the process end, and with it the holder and the objects; waits for nothing."""
        self._due.put(None)
        self._channel.close()

    def stop(self) -> None:
        """End the process; twice is fine."""
        self.hang_up()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send_all(self) -> None:
        while (due := self._due.get()) is not None:
            op, descriptor, message = due
            self._channel.send(op, descriptor=descriptor, **message)
            if descriptor is not None:
                os.close(descriptor)


def join_cluster(config: ServerConfig) -> RayLink:
    """Start the Ray process and have it join the cluster of ``--ray-address``.

    Raises:
        ConfigError: Ray is not installed, there is no such cluster, or its store has no room for
            ``--ray-budget``.
    """
    if importlib.util.find_spec("ray") is None:
        why = "Ray is not installed here: pip install 'teacher-logits[ray]'"
        raise refused(config.ray_address, why)
    check_listening(config.ray_address)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    epoch, key = keys.new_epoch(), os.urandom(32)
    with theirs:
        process = subprocess.Popen(
            [*command(), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if config.log_level == "debug" else subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the server, which ends it when it has drained
        )
    channel = Channel(ours)
    channel.wait(JOIN_SECONDS)
    try:
        channel.send(
            "join",
            address=config.ray_address,
            namespace=config.ray_namespace,
            epoch=epoch,
            key=key.hex(),
        )
        received = channel.receive()
        joined = _read(config, None if received is None else received[0], epoch=epoch, key=key)
    except BaseException:
        process.kill()
        process.wait()
        channel.close()
        raise
    channel.wait(SILENT_SECONDS)
    _log.info("joined a Ray cluster", extra={"facts": _facts(joined)})
    return RayLink(process, channel, joined)


def command() -> list[str]:
    """Return what starts a Ray process; the number of its end of the channel comes behind it."""
    return [sys.executable, "-m", _MODULE]


def _read(config: ServerConfig, message: Message | None, *, epoch: str, key: bytes) -> Joined:
    """Return what the process says of the cluster; refuse where it could not join."""
    if message is None or text(message, "op") != "joined":
        said = text(message or {}, "said") or f"it did not come to an end within {JOIN_SECONDS:g} s"
        raise no_cluster(config.ray_address, said)
    most = number(message, "most_bytes")
    store = number(message, "store_bytes")
    budget = config.ray_budget_bytes or int(store * _DEFAULT_SHARE)
    if budget > most:
        raise ConfigError(
            f"--ray-budget {size_setting(budget)}: the object store of this node has {store} "
            f"bytes, and Ray spills to disk above {most}: give at most that, or start the node "
            "with a larger store (ray start --object-store-memory)",
            facts={"flag": "--ray-budget", "value": budget, "store_bytes": store},
        )
    return Joined(
        epoch=epoch,
        key=key,
        holder=RayHolder(
            namespace=config.ray_namespace,
            name=text(message, "holder"),
            cluster_address=text(message, "cluster"),
            node_id=text(message, "node"),
        ),
        challenge=bytes.fromhex(text(message, "challenge")),
        store_bytes=store,
        most_bytes=most,
        budget_bytes=budget,
    )


def _facts(joined: Joined) -> dict[str, str | int]:
    return {
        "cluster": joined.holder.cluster_address,
        "node": joined.holder.node_id,
        "holder": joined.holder.name,
        "store_bytes": joined.store_bytes,
        "budget_bytes": joined.budget_bytes,
    }
