"""Slabs of a teacher worker's own, for students on its node: payloads that are never copied.

The worker writes into a slab (``slab``), and lends its descriptor to whom it gave the reference,
over a Unix socket that has no file. Who frees what:

    the worker dies    its slabs go when no student views them; nothing is left behind. A map that a
                       student kept for the next payload goes when it opens another worker's
    a student reads    its connection stays open as long as a tensor views the slab, and the slab is
                       not written into again before the kernel says that the connection ended
    nobody reads       a slab is written into again once ``keep`` payloads were put after its own,
                       or all were retired

    free --take--> written --put--> lent --keep others put or retired, and no reader--> free

Promises: room is taken from the system here and now, so that a full machine is an error and no
killed process. Refuses room beyond its budget, a reader of another user, and one that comes when
its payload has been written over (``slab_reading`` says so by ``PayloadRetiredError``).
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from teacher_logits.errors import (
    ForkedClientError,
    PoolFullError,
    RequestInvalidError,
)
from teacher_logits.layout import ALIGNMENT_BYTES, round_up
from teacher_logits.payload import Extent
from teacher_logits.slab import WriterSlab
from teacher_logits_client.forks import refuse_to_travel
from teacher_logits_client.ray.given import check_size
from teacher_logits_client.ray.slab_references import (
    ASK,
    LENT,
    SECRET_BYTES,
    WRITTEN_OVER,
    SlabReference,
    may_read,
)

if TYPE_CHECKING:
    from teacher_logits_client.ray.descriptions import PayloadDescription
    from teacher_logits_client.ray.flat import Bytes


@dataclass(kw_only=True, eq=False)
class _Slab:
    number: int
    slab: WriterSlab
    buffer: Bytes
    generation: int = 1  # odd: not to be read
    put_at: int | None = None  # the payload's number; None while it is free or written
    is_written: bool = False
    readers: set[socket.socket] = field(default_factory=set)


class SlabRoom:
    """Room for payloads in slabs; give it to ``DeferredTeacher(room=...)``, and close it."""

    def __init__(self, *, budget_bytes: int, keep: int = 1) -> None:
        """Make room of at most ``budget_bytes``; ``PayloadInvalidError`` for what is no size."""
        for what, size in (("budget_bytes", budget_bytes), ("keep", keep)):
            check_size(size, what=what)
        self._pid = os.getpid()
        self._is_closed = False
        self._budget_bytes = budget_bytes
        self._keep = keep
        self._put_count = self._retired_count = self._made_count = self._pledged_bytes = 0
        self._slabs: list[_Slab] = []
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._lock = threading.Lock()  # around the slabs' states; never held across I/O
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket_name = f"teacher-logits-{secrets.token_hex(12)}"
        self._listener.bind(f"\0{self._socket_name}")
        self._listener.listen(64)
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._lend, name="teacher-logits-slabs", daemon=True)
        self._thread.start()

    def take(self, size_bytes: int) -> Bytes:
        """Return room that nobody reads, of a slab that has been used before if there is one.

        Raises:
            PoolFullError: the budget is spent on payloads that are kept or read.
            RequestInvalidError: the room is closed.
            ForkedClientError: it is another process's, whose memory this one would write into.
            OSError: the system has no memory for another slab.
        """
        self._check_here()
        with self._lock:
            free = [each for each in self._slabs if self._is_free(each)]
            fitting = [each for each in free if each.slab.size_bytes >= size_bytes]
            if fitting:
                found = min(fitting, key=lambda each: each.slab.size_bytes)
                self._start_writing(found)
                return found.buffer
            for each in free:
                self._slabs.remove(each)
            held = self._pledged_bytes + sum(each.slab.size_bytes for each in self._slabs)
            number, self._made_count = self._made_count, self._made_count + 1
            need = round_up(size_bytes, ALIGNMENT_BYTES)
            fits = held + need <= self._budget_bytes
            self._pledged_bytes += need if fits else 0
        _let_go(free)
        if not fits:
            raise PoolFullError(
                f"a payload needs {need} bytes, and {held} of the budget of {self._budget_bytes} "
                f"are lent or read: give budget_bytes for {self._keep + 1} payloads, and one more "
                "for each that students hold beyond their step",
                facts={"need": need, "held": held, "budget": self._budget_bytes},
            )
        return self._make(number, need)

    def _make(self, number: int, need: int) -> Bytes:
        """Return the room of a slab that is new; its bytes are pledged, and no longer so after."""
        made = None
        try:
            slab = WriterSlab(f"{self._socket_name}-{number}", need)
            extent = Extent(
                slab_id=slab.slab_id, offset_bytes=0, size_bytes=need, slot=0, generation=0
            )
            room = np.frombuffer(slab.room(extent), dtype=np.uint8)
            made = _Slab(number=number, slab=slab, buffer=room, is_written=True)
        finally:
            with self._lock:
                self._pledged_bytes -= need
                if made is not None:
                    self._slabs.append(made)
        return made.buffer

    def put(self, description: PayloadDescription, buffer: Bytes) -> SlabReference:
        """Let readers in, and return what they open the payload by.

        Raises:
            RequestInvalidError: the room is closed, or the buffer is none of it.
            ForkedClientError: as for ``take``.
        """
        self._check_here()
        found = self._of(buffer)
        if found is None:
            raise RequestInvalidError("the buffer is none of this room's: give what take returned")
        with self._lock:
            found.generation += 1
            found.put_at = self._put_count
            found.is_written = False
            self._put_count += 1
        found.slab.mark(0, found.generation)
        extent = Extent(
            slab_id=found.slab.slab_id,
            offset_bytes=0,
            size_bytes=description.size_bytes,
            slot=0,
            generation=found.generation,
        )
        return SlabReference(
            extent=extent,
            number=found.number,
            socket_name=self._socket_name,
            secret=self._secret,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def give_back(self, buffer: Bytes) -> None:
        """Take room back that was not put; of a room that is closed nothing is left to take."""
        if self._pid != os.getpid():
            return
        found = self._of(buffer)
        with self._lock:
            if found is not None:
                found.is_written = False

    def retire(self) -> None:
        """Free what was put so far as soon as nobody has it open, whatever ``keep`` says."""
        with self._lock:
            self._retired_count = self._put_count

    def is_read(self) -> bool:
        """Say whether a reader has something open."""
        with self._lock:
            return any(each.readers for each in self._slabs)

    def close(self) -> None:
        """Lend nothing more. What students have open stays theirs until they let go of it.

        Twice is fine; in a forked child nothing happens.
        """
        if self._pid != os.getpid():
            return
        self._is_closed = True
        self._waker.close()
        self._thread.join()
        with self._lock:
            slabs, self._slabs = self._slabs, []
        _let_go(slabs)

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_to_travel("a SlabRoom", "make one in each worker")

    def _check_here(self) -> None:
        if self._pid != os.getpid():
            raise ForkedClientError(
                f"this SlabRoom is of process {self._pid}, and {os.getpid()} is a fork of it: make "
                "one of its own in each worker",
                facts={"made_by": self._pid, "pid": os.getpid()},
            )
        if self._is_closed:
            raise RequestInvalidError("this SlabRoom is closed: make another")

    def _of(self, buffer: Bytes) -> _Slab | None:
        with self._lock:
            return next((each for each in self._slabs if each.buffer is buffer), None)

    def _is_free(self, each: _Slab) -> bool:
        if each.is_written or each.readers:
            return False
        gone = max(self._retired_count, self._put_count - self._keep)
        return each.put_at is None or each.put_at < gone

    def _start_writing(self, each: _Slab) -> None:
        """Bar readers: from here on a reference to what lay here is refused."""
        if each.put_at is not None:
            each.generation += 1
            each.slab.mark(0, each.generation)
        each.put_at = None
        each.is_written = True

    def _lend(self) -> None:
        """Answer readers, and hear of their end, until the room is closed."""
        readers: set[socket.socket] = set()
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._woken in ready:
                    break
                for reader in readers & ready:
                    if not self._answer(reader):
                        selector.unregister(reader)
                        readers.discard(reader)
                        reader.close()
                if self._listener in ready:
                    reader, _ = self._listener.accept()
                    selector.register(reader, selectors.EVENT_READ)
                    readers.add(reader)
        for reader in readers:
            reader.close()

    def _answer(self, reader: socket.socket) -> bool:
        """Lend what is asked for; False where the reader is to be hung up on, or is gone."""
        try:
            request = reader.recv(ASK.size)
        except OSError:
            request = b""
        if len(request) != ASK.size or not may_read(reader, request, self._secret):
            with self._lock:
                for each in self._slabs:
                    each.readers.discard(reader)
            return False
        _, number, generation = ASK.unpack(request)
        with self._lock:
            lent = next(
                (
                    each
                    for each in self._slabs
                    if each.number == number
                    and each.generation == generation
                    and each.put_at is not None
                ),
                None,
            )
            if lent is not None:
                lent.readers.add(reader)
        try:
            if lent is None:
                reader.sendall(WRITTEN_OVER)
            else:
                socket.send_fds(reader, [LENT], [lent.slab.fd])
        except OSError:
            return False
        return True


def _let_go(slabs: list[_Slab]) -> None:
    for each in slabs:
        each.buffer = np.empty(0, dtype=np.uint8)
        each.slab.close()
