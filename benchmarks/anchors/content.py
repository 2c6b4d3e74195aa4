"""What the anchors move: bytes that both sides can make, so that what came can be compared."""

from __future__ import annotations

import random


def content_of(size_bytes: int) -> bytes:
    """Return the first bytes of the content; any size gives a beginning of the same."""
    return random.Random(0).randbytes(size_bytes)
