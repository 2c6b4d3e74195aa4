"""Memory that is the reader's own for good: what ``MapMode.COPY`` gives, over any transport.

A column is copied where it lies: on the host into host memory, on a device into memory of torch's
own on the same device. The copies are complete when ``copy`` returns, and the writer's room may go
back. On a device that may hang that is done on another thread; as long as it is under way, and
nobody waits for it any more, the thread alone has the writer's memory.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from teacher_logits.devices.views import DeviceView
from teacher_logits.layout import round_up
from teacher_logits.tensors import column_tensor, to_bytes
from teacher_logits_client.openers.host_payload import HostPayload
from teacher_logits_client.openers.last_reads import current

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from teacher_logits.layout import Column, ColumnKind
    from teacher_logits_client.openers import OpenedPayload, View
    from teacher_logits_client.openers.driver_threads import DriverThreads


class OwnPayload:
    """A payload in memory that is the reader's own for good: whoever has the tensors owns it.

    ``device`` is where its columns over positions are.
    """

    copied = True

    def __init__(self, opened: OpenedPayload, columns: Sequence[Column]) -> None:
        """Take over an opened payload, of which ``copy`` makes the caller's own.

        That is done in the current stream of whoever calls this.
        """
        self.device = opened.device
        self._on_device: dict[ColumnKind, torch.Tensor] = {}
        self._dlpack_device = (0, 0)
        self._host = HostPayload(memoryview(b""))
        self._was_current = False
        self._columns = columns
        self._stream = _stream_of(opened.device)
        #: What is to be copied; of whoever holds the lock. None when it was.
        self._theirs: OpenedPayload | None = opened
        self._has_it = threading.Lock()

    def copy(self) -> OwnPayload:
        """Copy all of it, once, let go of the writer's memory, and return this.

        Raises:
            DeviceError: the driver does not say that the copies are complete.
        """
        if not self._has_it.acquire(blocking=False) or self._theirs is None:
            return self  # whoever wanted it has let go of it
        opened = self._theirs
        try:
            with self._stream:
                self._take(opened)
        except BaseException:
            self._has_it.release()
            raise
        #: Asked when the copy was complete; what becomes of the room later is no concern of it.
        self._was_current = opened.is_current()
        self._theirs = None
        self._has_it.release()
        return self

    def copy_by(self, until: float, calls: DriverThreads) -> None:
        """Copy on another thread, by a time of ``time.monotonic``; otherwise as ``copy``.

        Raises:
            DeadlinePassedError: the device was not done by then.
        """
        calls.before(until, self.copy, undo=lambda own: None, what="the copies of a payload")

    def _take(self, opened: OpenedPayload) -> None:
        """Copy it; keep its memory where the bytes were copied already."""
        if opened.copied and isinstance(opened, HostPayload):
            self._host = HostPayload(opened.buffer)
        else:
            self._host = self._copy(opened, self._columns)
            opened.finish(outlived=False)
            opened.vacate()

    def _copy(self, opened: OpenedPayload, columns: Sequence[Column]) -> HostPayload:
        """Copy each column; the host's to where it lies in its payload, and nothing around it."""
        size = round_up(max((each.end_bytes for each in columns), default=1), mmap.PAGESIZE)
        memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for column in columns:
            view = opened.view_of(column)
            if isinstance(view, DeviceView):
                self._dlpack_device = view.dlpack_device
                self._on_device[column.kind] = column_tensor(view, column).clone()
            else:
                memory[column.offset_bytes : column.end_bytes] = opened.bytes_of(column)
        return HostPayload(memory)

    @property
    def buffer(self) -> memoryview:
        """The bytes on the host, from the payload's first on."""
        return self._host.buffer

    def view_of(self, column: Column) -> View:
        """Return a new object over a column's memory; see ``OpenedPayload.view_of``."""
        own = self._on_device.get(column.kind)
        if own is None:
            return self._host.view_of(column)
        # A view starts where the payload would, of which only this column is here.
        start = own.data_ptr() - column.offset_bytes if own.numel() else 0
        return DeviceView(start, column.end_bytes, device=self._dlpack_device, owner=own)

    def bytes_of(self, column: Column) -> memoryview:
        """Return a column's bytes; a copy of those on a device."""
        own = self._on_device.get(column.kind)
        if own is None:
            return self._host.bytes_of(column)
        return memoryview(to_bytes(own.cpu()))

    def note_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from other use until a stream has done its work, as torch does it."""
        for own in self._on_device.values():
            if own.is_cuda:
                own.record_stream(stream)

    def finish(self, *, outlived: bool) -> None:
        """Do nothing: torch takes memory back in the order of its streams."""

    def is_current(self) -> bool:
        """Say whether the bytes were still those of the lease when they had been copied."""
        return self._was_current

    def vacate(self) -> int:
        """Let go of what was to be copied and was not; of nothing while a thread is copying it.

        Raises:
            OSError, DeviceError: see ``OpenedPayload.vacate``.
        """
        if not self._has_it.acquire(blocking=False) or self._theirs is None:
            return 0
        return self._theirs.vacate()


def _stream_of(device: torch.device) -> AbstractContextManager[object]:
    """Return what makes the caller's current stream of a device that of a block."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return nullcontext()
    return current(torch.cuda.current_stream(device))
