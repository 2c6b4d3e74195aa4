"""What a session has asked for: which ids it gave up, and what stood in its requests.

Pure. Of each kind the last ``LIMIT`` are kept, so that no session grows for ever; a lease keeps
the digest of its request besides.

Promises: a request that its client gave up is granted nothing any more, however late its
answer comes; an id that was used for one request is refused for another.
"""

from __future__ import annotations

from teacher_logits.errors import RequestInvalidError

LIMIT = 4096


class Requests:
    """The requests of one session, by their ids."""

    def __init__(self) -> None:
        self._given_up: dict[str, None] = {}
        self._digests: dict[str, bytes] = {}

    def give_up(self, request_id: str) -> None:
        """Grant this request nothing from now on."""
        self._given_up[request_id] = None
        if len(self._given_up) > LIMIT:
            del self._given_up[next(iter(self._given_up))]

    def check_wanted(self, request_id: str) -> None:
        """Refuse a request that was given up.

        Raises:
            RequestInvalidError: it was.
        """
        if request_id in self._given_up:
            raise RequestInvalidError(
                f"request {request_id!r} was given up by its client; take a fresh id for each "
                "request",
                facts={"request_id": request_id},
            )

    def note(self, request_id: str, digest: bytes) -> None:
        """Note what stands in a request; the same once more is a retry.

        Raises:
            RequestInvalidError: the id was used for another request.
        """
        check_same(request_id, self._digests.setdefault(request_id, digest), digest)
        if len(self._digests) > LIMIT:
            del self._digests[next(iter(self._digests))]


def check_same(request_id: str, first: bytes, digest: bytes) -> None:
    """Refuse an id for a request whose digest is not that of the first.

    Raises:
        RequestInvalidError: it is not.
    """
    if first != digest:
        raise reused(request_id)


def reused(request_id: str) -> RequestInvalidError:
    """Return the error of an id that was used for another request."""
    return RequestInvalidError(
        f"request id {request_id[:128]!r} was used for other rows, or for another call, already; "
        "take a fresh id for each request",
        facts={"request_id": request_id[:128]},
    )
