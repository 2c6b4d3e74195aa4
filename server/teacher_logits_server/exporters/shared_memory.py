"""The ``shared_memory`` transport: slabs go to readers as descriptors, over their broker line.

Nothing moves: readers map the same pages, of the server's own slabs and of the publishers'. Slabs
are sealed against writers (``slab``), and so is the page by which a reader proves that it can read
what the server wrote (``session_page``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import NotAllowedError, NotAvailable
from teacher_logits.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.device_memory import DeviceMemoryPart
    from teacher_logits_server.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class PassedSlab:
    """A slab on its way to a reader. Whoever holds it closes the descriptor, a copy.

    ``device`` is what of it lies in device memory, for a reader that reads it there.
    """

    descriptor: int
    size_bytes: int
    device: DeviceMemoryPart | None = None


class Descriptors(Protocol):
    """Slabs that can be passed; ``slabs.ServerSlabs`` and ``foreign.ForeignSlabs``."""

    def copy(self, slab_id: str) -> tuple[int, int]:
        """Return a copy of a slab's descriptor, and its size in bytes; KeyError without one."""


class SharedMemoryExporter:
    """Says which descriptor shows a reader what it may read.

    Args:
        slabs: where slabs are looked for, one behind the other.
    """

    transport = Transport.SHARED_MEMORY

    def __init__(self, *, ledger: Ledger, slabs: Sequence[Descriptors]) -> None:
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
        for slabs in self._slabs:
            try:
                descriptor, size_bytes = slabs.copy(slab_id)
            except KeyError:
                continue
            except OSError as error:
                raise NotAvailable(
                    f"the server cannot pass slab {slab_id[:128]!r} ({error.strerror}): raise its "
                    "limit of open files",
                    facts={"slab_id": slab_id[:128], "errno": error.errno or 0},
                ) from error
            break
        else:
            raise _no_slab(slab_id)
        try:
            # An idle slab leaves the ledger before it is closed; nothing will come there again.
            self._ledger.may_open(session_id, slab_id)
        except BaseException:
            os.close(descriptor)
            raise
        return PassedSlab(descriptor=descriptor, size_bytes=size_bytes)


def descriptor_of(slabs: Sequence[Descriptors], slab_id: str) -> int:
    """Return a copy of the descriptor of a slab that is in one of these; the caller closes it.

    Raises:
        OSError: this process has no descriptors left.
    """
    for each in slabs:
        try:
            return each.copy(slab_id)[0]
        except KeyError:
            continue
    raise KeyError(slab_id)


def _no_slab(slab_id: str) -> NotAllowedError:
    return NotAllowedError(
        f"there is no slab {slab_id[:128]!r} to open; leases name the slabs that there are",
        facts={"slab_id": slab_id[:128]},
    )
