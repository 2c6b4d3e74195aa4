"""What a call waits for, told before its answer: a header that comes as soon as the wait begins.

The text is for people: a log, a screen. A client that does not know the header takes no notice, and
from a server that does not send it nothing comes before the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_KEY = "teacher-logits-waits-for-bin"
_MAX_BYTES = 1024


def waits_to_metadata(text: str) -> tuple[tuple[str, bytes], ...]:
    """Return the header that says what is waited for; what is longer than 1 KiB is cut."""
    return ((_KEY, text.encode()[:_MAX_BYTES]),)


def waits_from_metadata(headers: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return what headers say of it, in printable characters; empty where they say nothing."""
    for key, value in headers or ():
        if key == _KEY and isinstance(value, bytes):
            text = value[:_MAX_BYTES].decode(errors="replace")
            return "".join(each if each.isprintable() else "?" for each in text)
    return ""
