"""Session openers: one session's openers, and which of them brings a lease's bytes.

    no extent                   streamed, or an object of a Ray cluster's store (``ray_object``)
    on a device alone           ``cuda_ipc``, however its writer was settled when it was granted
    in a slab, all of it        ``local`` or ``shared_memory``

Where that fails, ``fallback`` says what is tried next. What lies on a device alone, and cannot be
opened there any more, is an error that says so, or a stream where the server finds a host copy; and
the server is told, so that what comes next has one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    HostCopyNeededError,
    PoolFullError,
    SlabOpenError,
    TransportFailure,
)
from teacher_logits.transport import Transport
from teacher_logits_client.config import MapMode
from teacher_logits_client.fallback import Choice, next_transport
from teacher_logits_client.openers.cuda_ipc import CudaIpcOpener
from teacher_logits_client.openers.devices import OpenedSlabs
from teacher_logits_client.openers.local import LocalOpener
from teacher_logits_client.openers.ray_object import RayObjectOpener
from teacher_logits_client.openers.shared_memory import SharedMemoryOpener
from teacher_logits_client.openers.stream import StreamOpener

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits.payload import Extent
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_client.line import Line
    from teacher_logits_client.openers import OpenedPayload, Opener
    from teacher_logits_client.openers.buffers import BufferPool
    from teacher_logits_client.openers.devices import Devices
    from teacher_logits_client.openers.ray_object import PutObject
    from teacher_logits_client.sessions.agreement import Agreed

    Read = Callable[[str, int, float], Iterable[bytes]]

_log = logging.getLogger("teacher_logits_client")

_WAY_OUT = (
    "what its writer seals from now on has a host copy, so ask for a later step, or for this one "
    "again where the session wants cuda_ipc alone; open the publisher with host_copies='always' "
    "where a reader's device may fail"
)


class SessionOpeners:
    """The openers of one session.

    Args:
        read, read_as_written: yield a lease's bytes; see ``StreamOpener``.
        count: adds to one of the client's counts.
        withdraw: tells the server that a writer's device memory cannot be opened any more.
        put_object: has a lease's payload put into the object store; see ``RayObjectOpener``.
    """

    _has_fallen_back = False

    def __init__(
        self,
        agreed: Agreed,
        *,
        devices: Devices,
        mode: MapMode,
        buffers: BufferPool,
        read: Read,
        read_as_written: Read | None = None,
        count: Callable[..., None],
        withdraw: Callable[[str, TeacherLogitsError], None],
        put_object: PutObject | None = None,
    ) -> None:
        self._session_id = agreed.terms.session_id
        self._count = count
        self._withdraw = withdraw
        profile, line = agreed.profile, agreed.line
        self._choice = Choice(
            wanted=profile.transports, locality=profile.locality, has_line=line is not None
        )
        stream = StreamOpener(
            read,
            pool=buffers,
            count=lambda size: count("streamed_bytes", size),
            codec=agreed.terms.stream.codec,
            read_as_written=read_as_written,
        )
        self.by_transport: dict[Transport, Opener] = {Transport.STREAM: stream}
        if put_object is not None:
            self.by_transport[Transport.RAY_OBJECT] = self._make_objects(put_object, buffers, mode)
        self._shared: SharedMemoryOpener | None = None
        self._device: CudaIpcOpener | None = None
        if line is not None:
            self._shared = _make_shared(line, mode, devices)
            self._device = CudaIpcOpener(self._shared, OpenedSlabs(devices))
            self.by_transport[Transport.SHARED_MEMORY] = self._shared
            self.by_transport[Transport.CUDA_IPC] = self._device
        if agreed.resident is not None:
            self.by_transport[Transport.LOCAL] = LocalOpener(agreed.resident)

    def _make_objects(
        self, put_object: PutObject, buffers: BufferPool, mode: MapMode
    ) -> RayObjectOpener:
        may_stream = next_transport(Transport.RAY_OBJECT, self._choice) is not None
        as_views = mode is MapMode.READ_ONLY
        return RayObjectOpener(put_object, buffers, as_views=as_views, may_stream=may_stream)

    def open(
        self, lease: LeaseTerms, *, settled: Transport | None, until: float
    ) -> tuple[OpenedPayload, Transport]:
        """Return a lease's memory, and how its bytes came; ``settled`` is its writer's transport.

        Raises:
            TransportFailure: no transport that the session may use brought the bytes.
            StalePayloadError, DeadlinePassedError: see ``Opener.open``.
        """
        transport = _first(lease, settled)
        device_failure: TransportFailure | None = None
        while True:
            try:
                return self.by_transport[transport].open(lease, until=until), transport
            except TransportFailure as failure:
                if transport is Transport.CUDA_IPC:
                    device_failure = failure
                    self._withdraw(lease.writer_id, failure)
                other = next_transport(transport, self._choice)
                if other is None:
                    raise (failure if device_failure is None else _gone(lease, failure)) from None
                self._note_fallback(transport, other, failure)
                transport = other
            except PoolFullError as full:
                other = next_transport(transport, self._choice)
                if transport is not Transport.RAY_OBJECT or other is None:
                    raise
                self._note_fallback(transport, other, full)
                transport = other
            except HostCopyNeededError:
                if device_failure is None:
                    raise
                raise _gone(lease, device_failure) from None

    def open_announced(self, lease: LeaseTerms, *, until: float) -> tuple[OpenedPayload, Transport]:
        """Return the memory of a lease that is not sealed yet: it lies on the host.

        Raises:
            SlabOpenError, DeadlinePassedError: see ``Opener.open``; nothing else is tried.
        """
        opened = self._sharing().open(lease, until=until, is_announced=True)
        return opened, Transport.SHARED_MEMORY

    def seal_of(self, extent: Extent, *, until: float) -> Callable[[], bool]:
        """Return what says whether an announced extent is sealed; see ``SharedMemoryOpener``."""
        return self._sharing().seal_of(extent, until=until)

    def has(self, extent: Extent) -> bool:
        """Say whether the slab of an extent is mapped."""
        return self._shared is not None and self._shared.has(extent.slab_id)

    def opens_at_once(self, lease: LeaseTerms, *, settled: Transport | None) -> bool:
        """Say whether a lease can be opened without waiting for anybody."""
        if lease.extent is None or self._shared is None or self._device is None:
            return False
        transport, slab_id = _first(lease, settled), lease.extent.slab_id
        if transport is Transport.CUDA_IPC:
            return self._device.has(slab_id)
        return transport is Transport.SHARED_MEMORY and self._shared.has(slab_id)

    def forget_slabs(self, slab_ids: Sequence[str] | None) -> None:
        """Let go of slabs that are gone, or of all, once no lease is on them."""
        if self._shared is not None:
            self._shared.forget(slab_ids)

    def close(self) -> None:
        """Let go of the slabs; tensors keep what they view."""
        for opener in self.by_transport.values():
            opener.close()

    def _sharing(self) -> SharedMemoryOpener:
        if self._shared is None:
            raise SlabOpenError("a step was announced to a session that shares no memory")
        return self._shared

    def _note_fallback(self, failed: Transport, other: Transport, why: TeacherLogitsError) -> None:
        self._count("fallbacks")
        if not self._has_fallen_back:
            self._has_fallen_back = True
            _log.warning(
                "session %s: a payload comes over %s and not over %s as settled (%s: %s); later "
                "ones are only counted",
                self._session_id,
                other.value,
                failed.value,
                why.reason,
                why.message,
            )


def _first(lease: LeaseTerms, settled: Transport | None) -> Transport:
    """Return the transport that is tried first."""
    if lease.as_object:
        return Transport.RAY_OBJECT
    if lease.extent is None:
        return Transport.STREAM
    if lease.on_device:
        return Transport.CUDA_IPC
    # What has a host copy is read there: it is in the slab that the session maps in any case.
    is_device = settled is Transport.CUDA_IPC
    return Transport.SHARED_MEMORY if is_device else settled or Transport.STREAM


def _make_shared(line: Line, mode: MapMode, devices: Devices) -> SharedMemoryOpener:
    return SharedMemoryOpener(
        line.get_slab,
        mode=MapMode.READ_ONLY if mode is MapMode.COPY else mode,
        is_revoked=line.is_revoked,
        watch=line.watch,
        pinner=devices if mode is MapMode.PINNED else None,
    )


def _gone(lease: LeaseTerms, failure: TransportFailure) -> SlabOpenError:
    """Return the error for what lies on a device that cannot be opened any more."""
    payload_id = lease.payload.payload_id
    return SlabOpenError(
        f"payload {payload_id} of writer {lease.writer_id} lies in device memory alone, which "
        f"could not be opened: {failure.message}: {_WAY_OUT}",
        facts={**failure.facts, "payload_id": payload_id, "writer_id": lease.writer_id},
    )
