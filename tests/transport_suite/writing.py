"""A server in the tests' own process with its writer's parts laid open: any payload can be sealed.

The server is the real one, over real sockets and slabs; only that ``Core`` is kept hold of when
it is made. What is waited for comes from the ledger's own news of freed room.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from tests.transport_suite.contents import Content
from tests.transport_suite.dense_teacher import DenseTeacher

import teacher_logits_client as tl
from teacher_logits import keys
from teacher_logits.layout import ColumnKind
from teacher_logits.payload import Extent, Payload
from teacher_logits.pool import PoolUsage
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.tensors import column_tensor
from teacher_logits.transport import Transport
from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.core import Core
from teacher_logits_server.engines.served import Engines

PATIENCE_SECONDS = 30
PAGE_BYTES = 4096


def a_profile(**given: object) -> tl.StudentProfile:
    """A student of one rank."""
    grid = tl.BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=1)
    return tl.StudentProfile(**{"batch_grid": grid, **given})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A payload that its writer holds, and where it lies."""

    payload: Payload
    extent: Extent
    release: Callable[[], object]


class Embedded:
    """A server of this process, and what its writer can do."""

    def __init__(self, address: str, core: Core) -> None:
        self.address = address
        self.core = core
        self._freed = threading.Condition()
        core.ledger.on_room_freed(self._notify)

    @property
    def usage(self) -> PoolUsage:
        """Where the pool's bytes are, now."""
        return self.core.ledger.view().pool

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait for something that comes true when room is freed."""
        with self._freed:
            assert self._freed.wait_for(true, PATIENCE_SECONDS), self.core.ledger.view()

    @contextmanager
    def sealed(self, content: Content) -> Iterator[Sealed]:
        """Write a payload column by column, seal it, and hold it for the block."""
        held = self.seal(content)
        try:
            yield held
        finally:
            held.release()

    def seal(self, content: Content) -> Sealed:
        """Write a payload column by column and seal it; ``release`` ends the writer's hold."""
        core = self.core
        extent = core.slabs.room_for(core.ledger, content.size_bytes)
        with core.slabs.room(extent) as room:
            for column in content.columns:
                column_tensor(room, column).copy_(content.tensor(column))
        return self.publish(content.payload(keys.new_id("p", core.ledger.epoch)), extent)

    def publish(self, payload: Payload, extent: Extent) -> Sealed:
        """Seal what was written, and hold it by a session of the writer's own."""
        ledger = self.core.ledger
        opened = ledger.open_session(
            request_id=payload.payload_id,
            protocol_version=PROTOCOL_VERSION,
            profile=a_profile(top_k=1, transports=(Transport.STREAM,)),
        )
        session_id = opened.terms.session_id
        ledger.prove_locality(session_id, proofs={}, failures=[])
        ledger.publish(
            session_id=session_id,
            request_id=payload.payload_id,
            payload=payload,
            extent=extent,
        )
        return Sealed(
            payload=payload, extent=extent, release=lambda: ledger.close_session(session_id)
        )

    def room_bytes(self, held: Sealed, kind: ColumnKind) -> bytes:
        """Return a column as it lies in the writer's room."""
        column = held.payload.column(kind)
        with self.core.slabs.room(held.extent) as room:
            return bytes(room[column.offset_bytes : column.end_bytes])

    def force_reuse(self, held: Sealed) -> None:
        """Mark the payload's slot as if its room had been given to another payload."""
        self.core.slabs.mark(held.extent, held.extent.generation + 2)

    def _notify(self) -> None:
        with self._freed:
            self._freed.notify_all()


@contextmanager
def embedded_server(
    folder: Path, *, pool_bytes: int, engine: Engines = None, **settings: object
) -> Iterator[Embedded]:
    """Run a server in a thread of this process, by default with the dense teacher.

    Its sessions outlast any test.
    """
    made: list[Core] = []

    make = Core.__init__

    def make_and_keep(core: Core, **given: object) -> None:
        make(core, **given)  # type: ignore[arg-type]
        made.append(core)

    values: dict[str, object] = {
        "listen": (f"unix:{folder / 's'}",),
        "pool_size_bytes": pool_bytes,
        "slab_size_bytes": pool_bytes,
        "session_ttl": timedelta(hours=1),
        **settings,
    }
    config = ServerConfig(**values)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Core, "__init__", make_and_keep)
        with serve_in_thread(config, engine or DenseTeacher()) as served:
            yield Embedded(served.address, made[0])
