"""What the server says to whoever it admits, before it is settled where that one lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits.terms import SessionTerms


@dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """A session that was admitted and has yet to prove where it lives."""

    terms: SessionTerms
    broker_path: str
    nonce: bytes
