"""The transports that the suite runs over. A new one is a line of `WAYS`, and passes as it is.

But for `cuda_ipc`, whose writer and reader are never one process: what is asked here of the others
is asked of it in `tests/cuda/test_conformance.py`. And `ray_object` is a way where there is a Ray
cluster, which is in `tests/ray/test_ray_object.py` alone: that runs the suite over it.
"""

import os
from dataclasses import dataclass

from tests.ray.alone import INSIDE

from teacher_logits.transport import Transport


@dataclass(frozen=True, kw_only=True)
class Way:
    """A transport, and what a reader over it has.

    ``shares_room``: the writer's own room, guarded by its generation; else a copy.
    ``isolates``: bytes whose change nobody else sees.
    """

    transport: Transport
    shares_room: bool
    isolates: bool

    def __str__(self) -> str:
        return self.transport.value


RAY_OBJECT = Way(transport=Transport.RAY_OBJECT, shares_room=False, isolates=True)

WAYS = (
    Way(transport=Transport.LOCAL, shares_room=True, isolates=False),
    Way(transport=Transport.SHARED_MEMORY, shares_room=True, isolates=True),
    Way(transport=Transport.STREAM, shares_room=False, isolates=True),
    *([RAY_OBJECT] if INSIDE in os.environ else []),
)
