"""What the ledger lends to whoever moves bytes: room to write to, and payloads to read.

Plain values around the tables; they change nothing but a draft's own progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from teacher_logits.cuts import Cut, Segment
from teacher_logits.errors import HostCopyNeededError, PoolFullError, RequestInvalidError
from teacher_logits.layout import round_up
from teacher_logits.pool import PAGE_BYTES
from teacher_logits.terms import SERVER_WRITER
from teacher_logits_server.lending.full import RETRY_AFTER

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.encodings import Encoding
    from teacher_logits.payload import Extent, Payload
    from teacher_logits.pool import Growth, PoolUsage
    from teacher_logits_server.lending.registry import Sealed
    from teacher_logits_server.publishers import Published
    from teacher_logits_server.publishers.drafts import Draft, Drafts


class SlabLedger(Protocol):
    """What room needs of the ledger where a new slab is needed."""

    def add_slab(self, slab_id: str, size_bytes: int) -> None:
        """Take a slab into use."""

    def take_idle_slabs(self) -> list[str]:
        """Drop the slabs in which nothing lies."""


@dataclass(frozen=True, kw_only=True)
class PayloadRoom:
    """Room for one payload: to ``slabs.ServerSlabs.room_for``, a ledger.

    ``take`` reserves it. A streamed payload has its room in the same step, so that nothing is left
    where its publisher ends meanwhile; reserved again, it is the same.
    """

    size_bytes: int
    take: Callable[[], Extent | Growth]
    ledger: SlabLedger

    def reserve(self, size_bytes: int) -> Extent | Growth:
        """Take the payload's room, or say which slab must be added first.

        Raises:
            PoolFullError: it does not fit now, or the room is kept for a lower step.
            ReservationLapsedError: the reservation has ended.
        """
        return self.take()

    def add_slab(self, slab_id: str, size_bytes: int) -> None:
        """Take a slab into use."""
        self.ledger.add_slab(slab_id, size_bytes)

    def take_idle_slabs(self) -> list[str]:
        """Drop the slabs in which nothing lies."""
        return self.ledger.take_idle_slabs()


class Writing:
    """A streamed payload while its bytes come, in order."""

    def __init__(self, draft: Draft, extent: Extent) -> None:
        self._draft = draft
        self.payload: Payload = draft.payload
        self.extent = extent

    @property
    def offset_bytes(self) -> int:
        """First byte that has not come."""
        return self._draft.written_bytes

    def advance(self, end_bytes: int) -> None:
        """Note that all bytes before ``end_bytes`` have come.

        Raises:
            RequestInvalidError: it lies outside of the payload, or goes back.
        """
        if not self.offset_bytes <= end_bytes <= self.payload.size_bytes:
            raise RequestInvalidError(
                f"payload {self.payload.payload_id} has {self.offset_bytes} of its "
                f"{self.payload.size_bytes} bytes, and cannot have {end_bytes}",
                facts={"end_bytes": end_bytes, "size_bytes": self.payload.size_bytes},
            )
        self._draft.written_bytes = end_bytes


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A payload that the server reads, as its lease shows it.

    ``segments`` are the bytes of ``payload``; their sources count from the extent's start. What
    none of them covers is padding, and zero. ``writer_id`` says whose slab the extent is in.
    ``encoding``: how it is streamed, where that is not as its own bytes. ``as_object``: its reader
    has it from an object store. ``extent`` is None while it lies where it was computed alone.
    """

    payload: Payload
    extent: Extent | None
    writer_id: str
    segments: tuple[Segment, ...]
    encoding: Encoding | None = None
    as_object: bool = False

    @property
    def room(self) -> Extent:
        """Where it lies in a slab; ValueError where it does not yet."""
        if self.extent is None:
            raise ValueError(f"payload {self.payload.payload_id} lies in no slab")
        return self.extent


def pinned(sealed: Sealed, cut: Cut | None = None) -> Pinned:
    """Return a payload with its bytes: all of them, or those of a cut.

    In the host twin of device memory there are columns, and holes between them.
    """
    if cut is None:
        runs = [(0, sealed.payload.size_bytes)]
        if sealed.on_device:
            columns = [column for column in sealed.payload.columns if column.size_bytes]
            runs = [(column.offset_bytes, column.size_bytes) for column in columns]
        segments = [
            Segment(source_offset_bytes=start, offset_bytes=start, size_bytes=size)
            for start, size in runs
        ]
        cut = Cut(payload=sealed.payload, segments=tuple(segments))
    return Pinned(
        payload=cut.payload,
        extent=sealed.extent,
        writer_id=sealed.writer_id,
        segments=cut.segments,
    )


def check_on_host(sealed: Sealed) -> None:
    """Refuse to read a payload whose columns have no host copies: zeros are none.

    Raises:
        HostCopyNeededError: it lies in device memory alone.
    """
    if sealed.host_copy:
        return
    raise HostCopyNeededError(
        f"payload {sealed.payload.payload_id} lies in device memory of writer {sealed.writer_id} "
        "alone, and cannot be streamed: its reader was settled on cuda_ipc when it was sealed; ask "
        "for a later step",
        facts={"payload_id": sealed.payload.payload_id, "writer_id": sealed.writer_id},
    )


def check_room_kept(
    published: Published, drafts: Drafts, usage: PoolUsage, *, step: int, size_bytes: int
) -> None:
    """Refuse room to a step where that would leave too little for the lowest that is open.

    Raises:
        PoolFullError: the shards that this one lacks would not fit any more, taken to be as
            large.
    """
    lowest = published.steps.lowest_open_step
    if step <= lowest:
        return
    missing = _missing(published, drafts, lowest)
    size = round_up(size_bytes, PAGE_BYTES)
    if usage.free_bytes - size >= missing * size:
        return
    raise PoolFullError(
        f"step {step} waits: of the pool's {usage.budget_bytes} bytes {usage.free_bytes} are free, "
        f"and {missing} payloads of {size} bytes are kept room for, which step {lowest} still "
        "lacks; wait for leases to come back, or raise --pool-size on the server",
        facts={
            "step": step,
            "lowest_open_step": lowest,
            "need_bytes": size,
            "kept_bytes": missing * size,
            "free_bytes": usage.free_bytes,
            "quarantined_bytes": usage.quarantined_bytes,
            "budget_bytes": usage.budget_bytes,
        },
        retry_after=RETRY_AFTER,
    )


def _missing(published: Published, drafts: Drafts, number: int) -> int:
    """Count the shards of a step that will come by stream and have no room yet."""
    step = published.steps.find(number)
    waiting = drafts.without_room(published.profile.teacher_id, number)
    local = {
        shard
        for shard, member in published.members.items()
        if member.writer_id not in ("", SERVER_WRITER)
    }
    shards = range(published.shard_count)
    lacking = shards if step is None else step.lacking(shards)
    return waiting + sum(shard not in local for shard in lacking)
