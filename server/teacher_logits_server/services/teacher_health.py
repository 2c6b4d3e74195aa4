"""The health of each teacher that the server runs itself, under a name of its own.

    ""                                          the server: a teacher of its own is there, or none
                                                was to be, and the broker lives
    "teacher_logits.v1.ScoringService/math"     that teacher

So a probe of the server does not restart the teachers that are well because of one that is not,
and who needs that one asks for it. Published teachers have no such name: they are their
publishers'. A change is logged once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from grpc_health.v1.health import aio

_log = logging.getLogger(__name__)

_SERVICE = "teacher_logits.v1.ScoringService"


def health_name(teacher_id: str) -> str:
    """Return the name under which a teacher's health is asked for."""
    return f"{_SERVICE}/{teacher_id}"


class TeacherHealth:
    """Tells the health of teachers. Used on the server's loop alone."""

    def __init__(self, servicer: aio.HealthServicer) -> None:
        self._servicer = servicer
        self._told: dict[str, bool] = {}

    async def tell(self, able: Mapping[str, bool], *, draining: bool) -> None:
        """Say of each teacher whether it takes requests; while draining none does."""
        for teacher_id, is_able in able.items():
            serving = is_able and not draining
            if self._told.get(teacher_id) is serving:
                continue
            if not serving and not draining:
                _log.error("a teacher does not serve", extra={"facts": {"teacher_id": teacher_id}})
            self._told[teacher_id] = serving
            status = health_pb2.HealthCheckResponse
            await self._servicer.set(
                health_name(teacher_id), status.SERVING if serving else status.NOT_SERVING
            )

    async def end(self) -> None:
        """Say of each that it takes none any more."""
        await self.tell(dict.fromkeys(self._told, False), draining=True)
