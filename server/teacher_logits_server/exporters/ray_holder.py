"""The holder: the named Ray actor that hands out references to a server's payloads.

It runs in a worker of the cluster and keeps nothing but references and tokens; the objects are
owned by the server's own Ray process (``ray_process``), and end with that, not with the holder.
Who can call it is of the cluster, and proves that by its challenge. A reference goes to whoever
shows a token that was granted for it and not revoked; nobody else learns whether there is one.
"""

from __future__ import annotations

import threading


class Holder:
    """References by object, each with the tokens that are good for it.

    Args:
        challenge: what a client reads here, and proves to the server.
    """

    def __init__(self, challenge: bytes) -> None:
        self._challenge = challenge
        self._references: dict[str, list[object]] = {}
        self._tokens: dict[str, set[bytes]] = {}
        self._lock = threading.Lock()

    def challenge(self) -> bytes:
        """Return what proves that the caller is of this cluster."""
        return self._challenge

    def grant(self, object_id: str, tokens: list[bytes], references: list[object]) -> None:
        """Hand an object's one reference out to these tokens too.

        It comes and goes in a list: Ray would fetch the object of a bare one.
        """
        with self._lock:
            self._references[object_id] = references
            self._tokens.setdefault(object_id, set()).update(tokens)

    def revoke(self, object_id: str, token: bytes) -> None:
        """Hand an object out to this token no more."""
        with self._lock:
            self._tokens.get(object_id, set()).discard(token)

    def drop(self, object_id: str) -> None:
        """Let go of an object's reference; twice is fine."""
        with self._lock:
            self._references.pop(object_id, None)
            self._tokens.pop(object_id, None)

    def take(self, object_id: str, token: bytes) -> list[object]:
        """Return an object's reference in a list, which is empty for a token that is not good."""
        with self._lock:
            if token not in self._tokens.get(object_id, ()):
                return []
            return self._references[object_id]
