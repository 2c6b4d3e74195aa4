"""The student worker's side of a slab: the owner's memory, mapped copy-on-write.

Promises: nothing is copied, and nobody writes into the memory while a tensor views it, for the
connection that says so ends with the last of them; a fork's views count. In-place arithmetic on
such a tensor stays in this process: pages of its own are dropped before the connection ends. A map
is kept for the next payload in its slab, which then costs no page faults, until its owner closes
the slab or is gone. Refuses a slab that is none, and one that was written over since.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import weakref
from typing import TYPE_CHECKING

import numpy as np

from teacher_logits.errors import PayloadRetiredError, SlabOpenError
from teacher_logits.layout import round_up
from teacher_logits.slab import CONTROL_BYTES, check_extent, is_retired, read_header
from teacher_logits_client.openers.pages import drop_dirtied
from teacher_logits_client.ray.slab_references import ASK, LENT
from teacher_logits_client.unix_sockets import connect_within

if TYPE_CHECKING:
    from teacher_logits_client.ray.flat import Bytes
    from teacher_logits_client.ray.slab_references import SlabReference

DEADLINE_SECONDS = 30.0


_Key = tuple[int, str, int]
_idle: dict[_Key, mmap.mmap] = {}
"""Maps that no tensor views: by process, owner and slab. Taken and put by single steps."""


def open_slab(reference: SlabReference, *, timeout: float = DEADLINE_SECONDS) -> Bytes:
    """Return a payload's bytes in its owner's slab; they are lent until the last view is gone.

    Raises:
        SlabOpenError: the owner is gone or not on this node, or what it lends is no such slab.
        PayloadRetiredError: the slab was written into again since.
    """
    key = (os.getpid(), reference.socket_name, reference.number)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        fd = _borrow(line, reference, timeout)
        try:
            mapping = _idle.pop(key, None) or _mapped(fd, reference)
        finally:
            os.close(fd)
        check_extent(reference.extent, size_bytes=len(mapping) - CONTROL_BYTES)
    except BaseException:
        line.close()
        raise
    start = CONTROL_BYTES + reference.extent.offset_bytes
    room = (ctypes.c_uint8 * reference.extent.size_bytes).from_buffer(mapping, start)
    address = ctypes.addressof(room) - start
    weakref.finalize(room, _give_back, key, mapping, address, line).atexit = False
    return np.frombuffer(memoryview(room), dtype=np.uint8)


def _give_back(key: _Key, mapping: mmap.mmap, address: int, line: socket.socket) -> None:
    """Keep a map that nobody views any more, then let its owner write."""
    try:
        is_mine = key[0] == os.getpid()  # a fork's end is the kernel's alone to tell
        if is_mine and not is_retired(mapping) and not _is_hung_up(line):
            drop_dirtied(address, round_up(len(mapping), mmap.PAGESIZE))
            _idle.setdefault(key, mapping)
    finally:
        line.close()


def _is_hung_up(line: socket.socket) -> bool:
    """Say whether the owner is gone; it says nothing more on a line otherwise."""
    line.setblocking(False)
    try:
        return not line.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _drop_maps_of_the_gone() -> None:
    """Let go of maps whose owner has closed the slab, or does not answer any more."""
    for key, mapping in list(_idle.items()):
        if is_retired(mapping) or key[0] != os.getpid() or not _is_there(key[1]):
            _idle.pop(key, None)


def _is_there(socket_name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.setblocking(False)
        try:
            line.connect(f"\0{socket_name}")
        except BlockingIOError:
            return True  # it has more callers than it answers at once
        except OSError:
            return False
        return True


def _borrow(line: socket.socket, reference: SlabReference, timeout: float) -> int:
    extent = reference.extent
    try:
        connect_within(line, f"\0{reference.socket_name}", timeout)
        line.settimeout(timeout)
        line.sendall(ASK.pack(reference.secret, reference.number, extent.generation))
        answer, fds, _, _ = socket.recv_fds(line, 1, 1)
    except OSError as error:
        raise _unreachable(reference, error.strerror or type(error).__name__) from error
    if answer == LENT and len(fds) == 1:
        return fds[0]
    for fd in fds:
        os.close(fd)
    if not answer:
        raise _unreachable(reference, "it hung up")
    raise PayloadRetiredError(
        f"the slab of generation {extent.generation} was written into again by process "
        f"{reference.pid}: open a payload before its worker has put keep others, or raise keep",
        facts={"generation": extent.generation, "pid": reference.pid},
    )


def _mapped(fd: int, reference: SlabReference) -> mmap.mmap:
    _drop_maps_of_the_gone()
    extent = reference.extent
    total = os.fstat(fd).st_size
    if total <= CONTROL_BYTES:
        raise SlabOpenError(f"slab {extent.slab_id} has {total} bytes", facts={"bytes": total})
    try:
        mapping = mmap.mmap(
            fd, total, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    except OSError as error:
        raise SlabOpenError(
            f"slab {extent.slab_id} of {total} bytes cannot be mapped: {error.strerror}",
            facts={"slab_id": extent.slab_id, "total_bytes": total},
        ) from error
    read_header(mapping, slab_id=extent.slab_id, total_bytes=total)
    return mapping


def _unreachable(reference: SlabReference, why: str) -> SlabOpenError:
    return SlabOpenError(
        f"process {reference.pid} of host {reference.host} does not lend its slab here: {why}. It "
        "has died, or is on another node or in another network namespace: there, payloads go "
        "through Ray's object store",
        facts={"pid": reference.pid, "host": reference.host, "why": why},
    )
