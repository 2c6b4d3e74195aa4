"""What a call must keep before its handler sees it: a deadline, a size, bytes that are a message.

no deadline (see ``WITHOUT_DEADLINE``)    RequestInvalidError
more than the RPC takes (64 KiB mostly)   RequestInvalidError, before they are parsed
bytes that are no message of the RPC      RequestInvalidError, INVALID_ARGUMENT
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from teacher_logits.errors import RequestInvalidError
from teacher_logits_server.metrics.instruments import HEALTH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

Q = TypeVar("Q")

REFLECTION = "/grpc.reflection."
REFLECTION_SECONDS = 60.0
"""Its clients set no deadline, so it has one of ours: a call that stays open takes a place."""
WITHOUT_DEADLINE = frozenset({f"{HEALTH}Watch"})
MAX_REQUEST_BYTES = 64 * 1024
OF_ANY_SIZE = frozenset(
    {
        "/teacher_logits.v1.ScoringService/Score",
        "/teacher_logits.v1.ScoringService/ScoredIds",
        "/teacher_logits.v1.RegistryService/ReservePayload",
        "/teacher_logits.v1.RegistryService/WritePayload",
    }
)
"""Sized by what the server takes of tokens, rows and bytes; the endpoint refuses longer ones."""


def check_deadline(remaining: float | None, method: str) -> None:
    """Refuse a call without a deadline: ``remaining`` are its seconds, None where it has none."""
    free = method in WITHOUT_DEADLINE or method.startswith(REFLECTION)
    if remaining is None and not free:
        raise RequestInvalidError(
            f"{method} needs a deadline: pass timeout=<seconds> with the call",
            facts={"method": method},
        )


async def read_messages(
    raws: AsyncIterator[bytes],
    parse: Callable[[bytes], Q] | None,
    method: str,
    check: Callable[[object], None] = lambda request: None,
) -> AsyncIterator[Q]:
    """Yield the messages of a stream of requests, each read, and then held against ``check``."""
    async for raw in raws:
        request = read_message(raw, parse, method)
        check(request)
        yield request


def read_message(raw: bytes, parse: Callable[[bytes], Q] | None, method: str) -> Q:
    """Return a request as a message; as it came where the RPC takes bytes."""
    _check_size(raw, method)
    if parse is None:
        return raw  # type: ignore[return-value]
    try:
        return parse(raw)
    except Exception:
        raise RequestInvalidError(
            f"the {len(raw)} bytes sent to {method} are no message of it",
            facts={"method": method, "size_bytes": len(raw)},
        ) from None


def _check_size(raw: bytes, method: str) -> None:
    if len(raw) > MAX_REQUEST_BYTES and method not in OF_ANY_SIZE:
        raise RequestInvalidError(
            f"{len(raw)} bytes were sent to {method}, which takes at most {MAX_REQUEST_BYTES}",
            facts={"method": method, "size_bytes": len(raw), "limit_bytes": MAX_REQUEST_BYTES},
        )
