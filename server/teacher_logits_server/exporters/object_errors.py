"""Why a payload is not to be had from the object store, in words and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import (
    DeadlinePassedError,
    NotAllowedError,
    ObjectLostError,
    PoolFullError,
)
from teacher_logits_server.exporters.ray_channel import number, text

if TYPE_CHECKING:
    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits_server.exporters.ray_channel import Message


def cluster_lost() -> ObjectLostError:
    """Return the error for whoever wants an object while there is no cluster."""
    return ObjectLostError(
        "the server's Ray process is gone, with its cluster or by itself, and its objects with it: "
        "payloads are streamed until it has joined one again"
    )


def not_settled(lease_id: str) -> NotAllowedError:
    """Return the error for a lease that is read another way."""
    return NotAllowedError(
        f"lease {lease_id} was not settled on ray_object: its session has not proven to be of the "
        "server's Ray cluster",
        facts={"lease_id": lease_id},
    )


def not_there(lease_id: str, waited: float) -> DeadlinePassedError:
    """Return the error for a ticket that did not come in time."""
    return DeadlinePassedError(
        f"the payload of lease {lease_id} was not in the object store after {waited:.3g} s",
        facts={"lease_id": lease_id, "waited_seconds": waited},
    )


def not_put(object_id: str, said: str) -> ObjectLostError:
    """Return the error for a payload that could not be put."""
    return ObjectLostError(
        f"a payload could not be put into the object store ({said})",
        facts={"object_id": object_id},
    )


def failure_of(message: Message) -> TeacherLogitsError:
    """Return the error of what could not be put, by the Ray process's message."""
    if text(message, "why") != "full":
        return not_put(text(message, "object"), text(message, "said"))
    need, used, most = (number(message, name) for name in ("need", "used", "most"))
    return PoolFullError(
        f"a payload of {need} bytes is to go into the object store of the server's node, which "
        f"has {used} bytes in use by everybody and would spill to disk above {most}: free some of "
        "it, start the node with a larger store, or allow 'stream'",
        facts={
            "need_bytes": need,
            "free_bytes": max(0, most - used),
            "used_bytes": used,
            "most_bytes": most,
        },
    )
