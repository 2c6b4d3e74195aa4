"""The engine's device memory: a pool of its own, and what readers of it open on trial.

Pure; a part of ``lending``. What the engine scores for a session that reads device memory lies
there, in slabs of the server's own; everybody else's payloads lie in the pool of host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.pool import PAGE_BYTES, SLOTS_PER_SLAB, Pool
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.views import DeviceSlabView

if TYPE_CHECKING:
    from teacher_logits_server.settlement.device_offers import DeviceOffer


class OwnDevice:
    """Room on the device of the server's engine.

    Args:
        offer: the server's own probe.
        budget_bytes: most device memory of all slabs together.
        slab_size_bytes: usual size of one.
    """

    def __init__(self, *, offer: DeviceOffer, budget_bytes: int, slab_size_bytes: int) -> None:
        self.offer = offer.of(SERVER_WRITER)
        self.pool = Pool(
            budget_bytes=budget_bytes // PAGE_BYTES * PAGE_BYTES,
            slab_size_bytes=slab_size_bytes,
            slots_per_slab=SLOTS_PER_SLAB,
            name="device pool",
            flag="--device-pool-size",
        )
        self._passed_to: dict[str, set[str]] = {}
        self._told_readers: list[tuple[str, str]] = []

    def note_passed(self, slab_id: str, session_id: str) -> None:
        """Note that a reader is passed a slab."""
        self._passed_to.setdefault(slab_id, set()).add(session_id)

    def drop_slab(self, slab_id: str) -> None:
        """Forget an idle slab; see ``Pool.drop_slab``."""
        self.pool.drop_slab(slab_id)
        self._told_readers += [(each, slab_id) for each in self._passed_to.pop(slab_id, ())]

    def take_unmappable(self) -> list[tuple[str, str]]:
        """Return (session id, slab id) of forgotten slabs and whoever may have them open, once."""
        told, self._told_readers = self._told_readers, []
        return told

    def forget_reader(self, session_id: str) -> None:
        """Learn that a session has ended."""
        for readers in self._passed_to.values():
            readers.discard(session_id)

    def views(self) -> tuple[DeviceSlabView, ...]:
        """Describe its slabs."""
        return tuple(
            DeviceSlabView(
                slab_id=slab_id,
                writer_id=SERVER_WRITER,
                session_id="",
                device_uuid=self.offer.probe.memory.device_uuid,
                size_bytes=size_bytes,
                used_bytes=used_bytes,
                reader_count=len(self._passed_to.get(slab_id, ())),
            )
            for slab_id, size_bytes, used_bytes in self.pool.slabs()
        )
