"""The holder: the named Ray actor that hands out references to a server's payloads.

It runs in a worker of the cluster and keeps nothing but references; the objects are owned by the
server's own Ray process (``ray_process``) or, of what its replicas have computed, by the server
itself (``replicas.stores``), and end with that, not with the holder. Who can call it
is of the cluster, and proves that by its challenge. A reference goes to whoever shows the token
that the server gave a lease for it, until that lease is revoked or the object dropped.
"""

from __future__ import annotations

import hashlib
import hmac
import threading


def token_of(key: bytes, object_id: str, lease_id: str) -> bytes:
    """Return what the reader of a lease is to show: HMAC-SHA256 of object and lease."""
    return hmac.new(key, f"{object_id}\0{lease_id}".encode(), hashlib.sha256).digest()


class Holder:
    """References by object.

    Args:
        challenge: what a client reads here, and proves to the server.
        key: of the tokens.
    """

    def __init__(self, challenge: bytes, key: bytes) -> None:
        self._challenge = challenge
        self._key = key
        self._references: dict[str, list[object]] = {}
        self._revoked: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def challenge(self) -> bytes:
        """Return what proves that the caller is of this cluster."""
        return self._challenge

    def keep(self, object_id: str, references: list[object], revoked: list[str]) -> None:
        """Hand an object's one reference out from now on, but for some leases.

        It comes and goes in a list: Ray would fetch the object of a bare one.
        """
        with self._lock:
            self._references[object_id] = references
            self._revoked[object_id] = set(revoked)

    def revoke(self, object_id: str, lease_id: str) -> None:
        """Hand an object out for this lease no more; one that is gone is fine."""
        with self._lock:
            self._revoked.get(object_id, set()).add(lease_id)

    def drop(self, object_id: str) -> None:
        """Let go of an object's reference; twice is fine."""
        with self._lock:
            self._references.pop(object_id, None)
            self._revoked.pop(object_id, None)

    def stay(self) -> None:
        """Never return: its end is how who has made this one learns that it is gone."""
        threading.Event().wait()

    def take(self, object_id: str, lease_id: str, token: bytes) -> list[object]:
        """Return an object's reference in a list, which is empty for a token that is not good."""
        if not hmac.compare_digest(token, token_of(self._key, object_id, lease_id)):
            return []
        with self._lock:
            if lease_id in self._revoked.get(object_id, ()):
                return []
            return self._references.get(object_id, [])
