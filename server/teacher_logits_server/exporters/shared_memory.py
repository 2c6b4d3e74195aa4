"""The ``shared_memory`` transport: slabs go to readers as descriptors, over their broker line.

Nothing moves: readers map the same pages. Slabs are sealed against writers (``slab``), and
so is the page by which a reader proves that it can read what the server wrote.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import NotAllowedError
from teacher_logits.pool import PAGE_BYTES
from teacher_logits.transport import Transport

if TYPE_CHECKING:
    from teacher_logits_server.exporters import Slabs
    from teacher_logits_server.ledger import Ledger

CHALLENGE_BYTES = 32

# Linux numbers; the fcntl module of Python 3.10 lacks some.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_WRITE = 0x1, 0x2, 0x4, 0x8


@dataclass(frozen=True, kw_only=True)
class PassedSlab:
    """A slab on its way to a reader. Whoever holds it closes the descriptor, a copy."""

    descriptor: int
    size_bytes: int


class SharedMemoryExporter:
    """Says which descriptor shows a reader what it may read."""

    transport = Transport.SHARED_MEMORY

    def __init__(self, *, ledger: Ledger, slabs: Slabs) -> None:
        self._ledger = ledger
        self._slabs = slabs

    def start(self) -> None:
        """Nothing is to be started; the broker carries the descriptors."""

    def stop(self) -> None:
        """Nothing is to be stopped."""

    def pass_slab(self, session_id: str, slab_id: str) -> PassedSlab:
        """Return a slab for a local session.

        Raises:
            NotAllowedError: the session may not open it, or there is no such slab.
        """
        self._ledger.may_open(session_id, slab_id)
        try:
            slab = self._slabs.find(slab_id)
            passed = PassedSlab(descriptor=os.dup(slab.fd), size_bytes=slab.total_bytes)
        except (KeyError, OSError):
            raise _no_slab(slab_id) from None
        try:
            # An idle slab leaves the pool before it is closed: if it is still there, what
            # was copied above was its descriptor and not another's by the same number.
            self._ledger.may_open(session_id, slab_id)
        except BaseException:
            os.close(passed.descriptor)
            raise
        return passed


def new_challenge() -> tuple[bytes, int]:
    """Return fresh random bytes, and the descriptor of a sealed page that starts with them.

    The caller owns the descriptor.
    """
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    fd = os.memfd_create("teacher-logits-challenge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        os.pwrite(fd, challenge, 0)
        seals = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_WRITE
        fcntl.fcntl(fd, _F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return challenge, fd


def _no_slab(slab_id: str) -> NotAllowedError:
    return NotAllowedError(
        f"there is no slab {slab_id[:128]!r} to open; leases name the slabs that there are",
        facts={"slab_id": slab_id[:128]},
    )
