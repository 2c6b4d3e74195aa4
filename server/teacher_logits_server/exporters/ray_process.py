"""The server's Ray process: a driver of the cluster, apart from the server that serves.

    server ==channel==> Ray process --put--> object store of this node   (it owns the objects)
                                    --keep--> holder ==reference==> readers of the cluster

It is a process of its own since a driver takes signal handlers and threads, and ends when its
cluster does: the server goes on without it. It ends with the server, whose end of the channel
closes, and with it the holder and all objects; so nothing is left in the cluster.

Promises: a payload is copied once, from its slab into the store; nothing is put that would bring
the store over Ray's spilling threshold, but waits for room, or fails with the numbers; where the
holder dies another takes its place and is told what its predecessor was.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import numpy
import ray
from ray.exceptions import RayError

from teacher_logits_server.exporters.ray_channel import Channel, number, runs, text
from teacher_logits_server.exporters.ray_store import Store, StoreUnknown, make_holder

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from ray.actor import ActorHandle

    from teacher_logits_server.exporters.ray_channel import Message
    from teacher_logits_server.exporters.ray_holder import Holder
    from teacher_logits_server.exporters.ray_store import HolderActor

    Bytes: TypeAlias = numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]

START_SECONDS = 60.0
TELL_SECONDS = 10.0
"""How long a holder may take to start, and to answer, before another takes its place."""
LOOK_SECONDS = 1.0
MOST_BLIND_LOOKS = 5
"""Looks at the node's raylet that may fail one after the other: Ray itself does not end a driver
whose raylet is gone, and nothing can be put any more."""
_POPULATE_READ = 22  # MADV_POPULATE_READ, which Python 3.10 has no name for


class RayProcess:
    """What the process does, message by message.

    Args:
        join: what the server wants: the cluster's address, a namespace, its epoch, and the key of
            its tokens.
    """

    def __init__(self, channel: Channel, join: Message) -> None:
        """Join the cluster and make the first holder.

        Raises:
            Exception: whatever Ray says.
        """
        self._channel = channel
        self._namespace, self._epoch = text(join, "namespace"), text(join, "epoch")
        ray.init(
            address=text(join, "address"),
            namespace=self._namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # the server says when it is over
        self._store = Store()
        self._challenge = os.urandom(32)
        self._key = bytes.fromhex(text(join, "key"))
        self._references: dict[str, object] = {}
        self._revoked: dict[str, list[str]] = {}
        self._restarts = 0
        # Guards the holder and what it was told, so that its successor is told the same.
        self._lock = threading.Lock()
        self._holder = self._make_holder()
        self._puts: queue.SimpleQueue[tuple[Message, int]] = queue.SimpleQueue()

    def run(self) -> None:
        """Do what the server says, until it hangs up."""
        self._channel.send(
            "joined",
            challenge=self._challenge.hex(),
            cluster=ray.get_runtime_context().gcs_address,
            node=self._store.node_id,
            holder=self._name(),
            store_bytes=self._store.capacity_bytes,
            most_bytes=self._store.most_bytes,
        )
        for work in (self._put_all, self._look):
            threading.Thread(target=_or_end, args=(work,), daemon=True).start()
        while (received := self._channel.receive()) is not None:
            message, descriptor = received
            op = text(message, "op")
            if op == "put" and descriptor is not None:
                self._puts.put((message, descriptor))
            elif op == "revoke":
                self._revoke(text(message, "object"), text(message, "lease"))
            elif op == "drop":
                self._drop(text(message, "object"))

    # Objects

    def _put_all(self) -> None:
        """Put one object after the other: two at a time would share the memory's bandwidth."""
        while True:
            message, descriptor = self._puts.get()
            object_id = text(message, "object")
            try:
                lacking = self._await_room(message)
                if lacking:
                    self._channel.send("put_failed", object=object_id, why="full", **lacking)
                    continue
                reference = ray.put(_payload(message, descriptor))
                self._store.note_put(number(message, "size"))
                with self._lock:
                    self._references[object_id] = reference
                del reference
                self._tell_holder(object_id)
                self._channel.send("put_done", object=object_id)
            except (RayError, StoreUnknown, OSError, ValueError, MemoryError) as error:
                self._drop(object_id)
                self._channel.send("put_failed", object=object_id, why="failed", said=_said(error))
            finally:
                os.close(descriptor)

    def _await_room(self, message: Message) -> dict[str, int]:
        """Wait for room below the store's threshold; return the numbers where there is none."""
        size = number(message, "size")
        used = self._store.await_room(size, seconds=number(message, "milliseconds") / 1000)
        return {} if used is None else {"need": size, "used": used, "most": self._store.most_bytes}

    def _drop(self, object_id: str) -> None:
        with self._lock:
            self._references.pop(object_id, None)
            self._revoked.pop(object_id, None)
            self._holder.drop.remote(object_id)

    # The holder

    def _tell_holder(self, object_id: str) -> None:
        """Have the holder hand an object out; one that died is replaced first.

        No name here is of the reference: an error of Ray's is part of a cycle, and keeps what the
        frames that it passed had until garbage is collected, which may be never.
        """
        with self._lock:
            holder = self._holder
            told = holder.keep.remote(object_id, [self._references[object_id]], [])
        try:
            ray.get(told, timeout=TELL_SECONDS)
        except RayError:
            self._replace(holder)

    def _revoke(self, object_id: str, lease_id: str) -> None:
        with self._lock:
            self._revoked.setdefault(object_id, []).append(lease_id)
            self._holder.revoke.remote(object_id, lease_id)

    def _replace(self, dead: HolderActor) -> None:
        """Make another holder, which is told all that the dead one was.

        Raises:
            RayError: nor does that one answer.
        """
        with self._lock:
            if self._holder is not dead:
                return
            with suppress(RayError):
                ray.kill(
                    cast("ActorHandle[Holder]", dead)
                )  # it may only have been slow, and there is to be one
            self._restarts += 1
            made = self._make_holder()
            told = [
                made.keep.remote(object_id, [reference], self._revoked.get(object_id, []))
                for object_id, reference in self._references.items()
            ]
            ray.get(told, timeout=TELL_SECONDS)
            self._holder = made  # until it knows all, the next look replaces the dead one again
            self._channel.send("holder", name=self._name(), restarts=self._restarts)

    def _make_holder(self) -> HolderActor:
        holder = make_holder(
            self._name(),
            namespace=self._namespace,
            node_id=self._store.node_id,
            arguments=(self._challenge, self._key),
        )
        ray.get(holder.challenge.remote(), timeout=START_SECONDS)
        return holder

    def _name(self) -> str:
        again = f"/{self._restarts}" if self._restarts else ""
        return f"teacher-logits-holder/{self._epoch}/{self._store.node_id[:16]}{again}"

    def _look(self) -> None:
        """Look at the store and after the holder, now and then; end where the store is gone."""
        blind = 0
        while blind < MOST_BLIND_LOOKS:
            holder = self._holder
            try:
                seen = self._store.look()
            except StoreUnknown:
                blind += 1
                time.sleep(LOOK_SECONDS)
                continue
            blind = 0
            self._channel.send("store", used=seen.used_bytes, spilled=seen.spilled_bytes)
            try:
                ray.get(holder.challenge.remote(), timeout=TELL_SECONDS)
            except RayError:
                with suppress(RayError):  # the next look tries again
                    self._replace(holder)
            time.sleep(LOOK_SECONDS)


def _payload(message: Message, descriptor: int) -> Bytes:
    """Return a payload's bytes, uint8 [size], where they lie in their slab; read-only.

    Where they lie in several runs they are copied together, with zeros for the padding.
    """
    start, room, size = (number(message, name) for name in ("start", "room", "size"))
    memory = mmap.mmap(descriptor, room, prot=mmap.PROT_READ, offset=start)
    with suppress(OSError):  # an older kernel: its pages come one by one
        memory.madvise(_POPULATE_READ)
    whole = numpy.frombuffer(memory, numpy.uint8)
    found = runs(message)
    if len(found) == 1 and found[0][1:] == [0, size]:
        return whole[found[0][0] : found[0][0] + size]
    made = numpy.zeros(size, numpy.uint8)
    for source, offset, length in found:
        made[offset : offset + length] = whole[source : source + length]
    return made


def _or_end(work: Callable[[], None]) -> None:
    """Do what the process is there for; without it, it ends, and the server joins anew."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def main() -> None:
    """Serve the server whose end of the channel is the descriptor that was named."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    received = channel.receive()
    if received is None:
        return
    try:
        process = RayProcess(channel, received[0])
    except Exception as error:
        channel.send("refused", said=_said(error))
        return
    process.run()
    # Ray's own end, with its waits, is for those who have something to finish.
    with suppress(Exception):
        ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
