"""What calls show in their metadata: the client's token, and the secret of the session they name.

A session's secret came over its broker line, and is kept for as long as the client: leases may
come back after their session was closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from teacher_logits import tracing
from teacher_logits.keys import SESSION_SECRET_KEY

if TYPE_CHECKING:
    from teacher_logits_client.credentials import Credentials

    Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Shown:
    """What one client's calls show."""

    def __init__(self, credentials: Credentials) -> None:
        self._token = credentials.token
        self._secrets: dict[str, str] = {}

    def keep(self, session_id: str, secret: str) -> None:
        """Have the calls of a session show its secret from now on."""
        self._secrets[session_id] = secret

    def metadata(self, session_id: str = "") -> Metadata:
        """Return what a call carries that names this session, or none; the current span too."""
        token, secret = self._token(), self._secrets.get(session_id, "")
        shown = tracing.outgoing() or ()
        if token:
            shown = (*shown, ("authorization", f"Bearer {token}"))
        return (*shown, (SESSION_SECRET_KEY, secret)) if secret else shown
