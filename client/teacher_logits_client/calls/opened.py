"""What the server says to whoever it admits, before it is settled where that one lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits.device_memory import DeviceProbe
    from teacher_logits.terms import RayHolder, SessionTerms


@dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """A session that was admitted and has yet to prove where it lives.

    ``device_probes`` is device memory of the writers that it needs, to be opened on trial;
    ``ray_holder`` is who to ask for a challenge in the server's Ray cluster, if it has one.
    """

    terms: SessionTerms
    broker_path: str
    nonce: bytes = field(repr=False)
    device_probes: tuple[DeviceProbe, ...] = ()
    ray_holder: RayHolder | None = None
