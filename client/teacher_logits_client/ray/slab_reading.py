"""The student worker's side of a slab: the owner's memory, mapped copy-on-write.

Promises: nothing is copied, and nobody writes into the memory while a tensor views it, for the
connection that says so ends with the last of them. In-place arithmetic on such a tensor stays in
this process. Refuses a slab that is none, and one that was written over since.
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from typing import TYPE_CHECKING

import numpy as np

from teacher_logits.errors import PayloadRetiredError, SlabOpenError
from teacher_logits.slab import CONTROL_BYTES, check_extent, read_header
from teacher_logits_client.ray.slab_references import ASK, LENT

if TYPE_CHECKING:
    from teacher_logits_client.ray.flat import Bytes
    from teacher_logits_client.ray.slab_references import SlabReference

DEADLINE_SECONDS = 30.0


def open_slab(reference: SlabReference, *, timeout: float = DEADLINE_SECONDS) -> Bytes:
    """Return a payload's bytes in its owner's slab; they are lent until the last view is gone.

    Raises:
        SlabOpenError: the owner is gone or not on this node, or what it lends is no such slab.
        PayloadRetiredError: the slab was written into again since.
    """
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        fd = _borrow(line, reference, timeout)
        try:
            mapping = _mapped(fd, reference)
        finally:
            os.close(fd)
    except BaseException:
        line.close()
        raise
    # The mapping dies with the last array over it.
    weakref.finalize(mapping, line.close)
    start = CONTROL_BYTES + reference.extent.offset_bytes
    return np.frombuffer(mapping, dtype=np.uint8, count=reference.extent.size_bytes, offset=start)


def _borrow(line: socket.socket, reference: SlabReference, timeout: float) -> int:
    line.settimeout(timeout)
    extent = reference.extent
    try:
        line.connect(f"\0{reference.socket_name}")
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
    size = read_header(mapping, slab_id=extent.slab_id, total_bytes=total)
    check_extent(extent, size_bytes=size)
    return mapping


def _unreachable(reference: SlabReference, why: str) -> SlabOpenError:
    return SlabOpenError(
        f"process {reference.pid} of host {reference.host} does not lend its slab here: {why}. It "
        "has died, or is on another node or in another network namespace: there, payloads go "
        "through Ray's object store",
        facts={"pid": reference.pid, "host": reference.host, "why": why},
    )
