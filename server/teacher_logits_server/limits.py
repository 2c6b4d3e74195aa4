"""What the tables need of a server's settings; ``config.ServerConfig`` has it all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datetime import timedelta


class Limits(Protocol):
    """Spans, counts and sizes that the ledger obeys."""

    @property
    def session_ttl(self) -> timedelta:
        """How long a remote session lives without a sign of life."""

    @property
    def renew_interval(self) -> timedelta:
        """How often clients are told to give one."""

    @property
    def opening_ttl(self) -> timedelta:
        """How long a session may stay unsettled."""

    @property
    def default_wait(self) -> timedelta:
        """How long a call may wait in the server."""

    @property
    def max_sessions(self) -> int:
        """Most sessions at a time."""

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one scoring request."""

    @property
    def pool_size_bytes(self) -> int:
        """Byte budget of all slabs together."""

    @property
    def slab_size_bytes(self) -> int:
        """Usual size of a slab."""

    @property
    def max_quarantine(self) -> float:
        """Share of the budget in quarantine above which new payloads are refused."""

    @property
    def keep_deserted(self) -> timedelta:
        """How long steps are kept of a teacher that all its publishers and readers have left."""

    @property
    def keep_steps(self) -> int:
        """Most steps kept of a published teacher; 0 for all that are not consumed."""
