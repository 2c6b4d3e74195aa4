"""The transports that the suite runs over. A new one is a line of `WAYS`, and passes as it is.

But for `cuda_ipc`, whose writer and reader are never one process: what is asked here of the others
is asked of it in `tests/cuda/test_conformance.py`.
"""

from dataclasses import dataclass

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


WAYS = (
    Way(transport=Transport.LOCAL, shares_room=True, isolates=False),
    Way(transport=Transport.SHARED_MEMORY, shares_room=True, isolates=True),
    Way(transport=Transport.STREAM, shares_room=False, isolates=True),
)
