"""Giving freed memory back to the system between a model's body and its head.

glibc keeps up to 64 MiB of what a body has freed, in pieces, for later small requests. The
head's chunk is too large to be made of them, so that both would count at the peak. On a C
library without ``malloc_trim`` nothing is done.
"""

from __future__ import annotations

import ctypes

WORTHWHILE_TOKENS = 1024
"""A body over fewer tokens leaves too little behind."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed_memory() -> None:
    """Return whole free pages to the system; takes milliseconds, and lets the GIL go."""
    if _trim is not None:
        _trim(ctypes.c_size_t(0))
