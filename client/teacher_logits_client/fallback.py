"""What is tried next when the bytes of a payload did not come: one table, no trying.

    failed           next
    local            shared_memory, if the session has a line; else stream
    cuda_ipc         stream, where the writer made a host copy: the server says if it did not
    shared_memory    stream
    ray_object       stream, as well where the object store has no room
    stream           nothing else: broken streams resume by themselves, at the byte they broke at

Under ``require`` and ``rule`` what is not local is never tried, and a transport that the
student did not want is never tried either. Nothing is silent: the payload names the
transport that it came over, and the first change of a session's transport is logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import ChecksumError, ServerUnreachableError, StreamBrokenError
from teacher_logits.transport import Locality, Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.errors import TeacherLogitsError

MAX_STREAM_TRIES = 6
"""Streams of one payload that may break one after the other without a byte between them.

Their pauses together outlast the longest wait of a channel before it connects anew: a server
that has just been started again is not given up for the memory of its predecessor.
"""

_FIRST_PAUSE_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a session lets its payloads come over."""

    wanted: Sequence[Transport]
    locality: Locality
    has_line: bool


def next_transport(failed: Transport, choice: Choice) -> Transport | None:
    """Return the transport to try after one failed; None where the failure is to be raised."""
    if failed is Transport.LOCAL and choice.has_line and Transport.SHARED_MEMORY in choice.wanted:
        return Transport.SHARED_MEMORY
    may_stream = Transport.STREAM in choice.wanted and choice.locality is Locality.PREFER
    return Transport.STREAM if may_stream and failed is not Transport.STREAM else None


def pause_before_resuming(error: TeacherLogitsError, *, fruitless: int) -> float | None:
    """Return the seconds to wait before a broken stream is resumed; None where it is not.

    ``fruitless`` counts the streams that ended one after the other without bringing a byte,
    the one that failed just now among them. The pause doubles with each.
    """
    resumable = isinstance(error, StreamBrokenError | ChecksumError | ServerUnreachableError)
    if not resumable or fruitless >= MAX_STREAM_TRIES:
        return None
    return _FIRST_PAUSE_SECONDS * 2 ** (fruitless - 1) if fruitless else 0.0
