"""Servers that live in this very process: how a reader finds its writer's own tensors.

A server enters its epoch here with a secret and a way to its slabs. A client in the same
process proves by the secret that it is here, and then reads the writer's memory itself;
another process cannot see the table, whatever it claims.
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.slab import WriterSlab


@dataclass(frozen=True, kw_only=True)
class Resident:
    """A server of this process: the secret that proves it, and its slabs by id."""

    find_slab: Callable[[str], WriterSlab]
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    #: A forked child inherits this table, and is another process all the same.
    pid: int = field(default_factory=os.getpid)


_lock = threading.Lock()
_residents: dict[str, Resident] = {}


def enter(epoch: str, resident: Resident) -> None:
    """Make a server of this process known."""
    with _lock:
        _residents[epoch] = resident


def leave(epoch: str) -> None:
    """Forget a server; doing so twice is fine."""
    with _lock:
        _residents.pop(epoch, None)


def find(epoch: str) -> Resident | None:
    """Return the server of that epoch if it lives in this process."""
    with _lock:
        resident = _residents.get(epoch)
    return resident if resident is not None and resident.pid == os.getpid() else None
