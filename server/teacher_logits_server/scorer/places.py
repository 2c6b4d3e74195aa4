"""Places: where a job's payload is written, and how it becomes the ledger's.

    session reads device memory   room in the engine's device memory
    session reads objects, and
      replicas compute            none here: the stores of their nodes
    any other session             room in host memory

A job has one place. Where its reader's device breaks while it is computed, the payload is copied
to the host half of its slab, and is read there.

Promises: all that was given to the device is done before anybody may read. Room that is given
back needs no such wait: what is written there next comes behind it in the same stream, which all
scorers of a device write in, its default one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from teacher_logits.device_memory import DeviceError
from teacher_logits.errors import EngineError, HostCopyNeededError
from teacher_logits.payload_room import DeviceRoom, HostRoom
from teacher_logits_server.engines.answers import Answer
from teacher_logits_server.engines.stored import StoredAnswer
from teacher_logits_server.lending.rooms import PayloadRoom
from teacher_logits_server.room_turns import NothingHeld
from teacher_logits_server.scorer.jobs import DEVICE, STORES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from teacher_logits.devices.slab import DeviceSlab
    from teacher_logits.payload import Extent, Payload
    from teacher_logits.payload_room import WriterRoom
    from teacher_logits.terms import LeaseTerms
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.room_turns import Held
    from teacher_logits_server.scorer.jobs import Work


class Slabs(Protocol):
    """Where payloads are written; ``slabs.ServerSlabs``."""

    def room_for(self, ledger: PayloadRoom, size_bytes: int) -> Extent:
        """Reserve room, and create a slab for it where none has any.

        Raises:
            PoolFullError: there is none now.
        """

    def room_on_device(self, ledger: Ledger, size_bytes: int, *, session_id: str) -> Extent:
        """Do so in device memory, of what a session may have."""

    def room(self, extent: Extent) -> memoryview:
        """Return the extent's bytes, writable."""

    def find_on_device(self, slab_id: str) -> DeviceSlab:
        """Return a slab of device memory."""


class Stores(Protocol):
    """Where payloads are handed out that stay where they were computed; ``replicas.stores``."""

    def put(self, payload_id: str, answer: StoredAnswer) -> None:
        """Hand a payload out until it is dropped."""

    def drop(self, payload_ids: Collection[str]) -> None:
        """Let go of payloads; what is gone is fine."""


class Places:
    """The places of one scorer's payloads. For its thread alone.

    Args:
        promise: promises room to a payload that stays; see ``Passes.promise_room``.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        slabs: Slabs,
        promise: Callable[[int], Callable[[], None]],
        stores: Stores | None = None,
    ) -> None:
        self._ledger = ledger
        self._slabs = slabs
        self._promise = promise
        self._stores = stores

    def room_held(self, pool: str) -> Held:
        """Return what each session has of a pool; of what stays elsewhere nothing is counted."""
        if pool == STORES:
            return NothingHeld()
        return self._ledger.room_held(on_device=pool == DEVICE)

    def take(self, work: Work) -> Answer | StoredAnswer:
        """Reserve a job's room, and lay its answer over that.

        Raises:
            PoolFullError: there is none now.
            TeacherLogitsError: its session has ended, or it will never fit.
        """
        plan = work.plan
        self._ledger.profile(work.job.session_id)  # it may have ended since
        if plan.stays:
            work.answer = StoredAnswer(
                plan.request,
                columns=plan.columns,
                wanted=plan.wanted,
                near=plan.near,
                leave=self._promise(plan.size_bytes),
            )
            return work.answer
        if plan.on_device:
            session_id = work.job.session_id
            work.extent = self._slabs.room_on_device(
                self._ledger, plan.size_bytes, session_id=session_id
            )
        else:
            work.extent = self._slabs.room_for(self._share_of(work), plan.size_bytes)
        work.answer = Answer(
            plan.request,
            room=self._room(work.extent, on_device=plan.on_device),
            columns=plan.columns,
            wanted=plan.wanted,
        )
        return work.answer

    def finish(self, answer: Answer | StoredAnswer, *, mask: bool) -> int:
        """Complete an answer; return how many of its rows are bad.

        Raises:
            PayloadInvalidError: some are, and are not to be masked.
            EngineError: the device failed at what it was given.
        """
        try:
            return answer.finish(mask=mask)
        except DeviceError as error:
            raise EngineError(
                f"the device failed while the teacher's scores were written ({error.message}); "
                "the server's log says more, and nvidia-smi may",
                facts=error.facts,
            ) from error

    def hand_over(self, work: Work, payload: Payload, *, host_copy: bool = False) -> LeaseTerms:
        """Publish a job's payload, and return the lease on it.

        Raises:
            TeacherLogitsError: as ``Ledger.publish``, which has the room by then; or there is no
                host memory for a copy, and the room is the job's still.
        """
        extent, answer = work.extent, work.answer
        work.extent = work.answer = None
        if isinstance(answer, StoredAnswer) and self._stores is not None:
            self._stores.put(payload.payload_id, answer)  # the ledger says when it is to be dropped
        elif extent is None:
            raise ValueError("a payload that lies nowhere cannot be handed over")
        try:
            return self._ledger.publish(
                session_id=work.job.session_id,
                request_id=work.job.request_id,
                payload=payload,
                extent=extent,
                digest=work.job.digest,
                host_copy=host_copy,
            )
        except HostCopyNeededError:
            if extent is None:
                raise
            work.extent = extent
            slab = self._slabs.find_on_device(extent.slab_id)
            slab.copy_to_twin(extent, payload.columns)
            return self.hand_over(work, payload, host_copy=True)

    def give_back(self, work: Work) -> None:
        """Give a job's room back, if it has some."""
        extent, answer = work.extent, work.answer
        work.extent = work.answer = None
        if isinstance(answer, StoredAnswer):
            answer.drop()
        if extent is not None:
            self._ledger.give_back(extent)

    def _share_of(self, work: Work) -> PayloadRoom:
        """Return host memory of which a payload counts in its teacher's and session's shares."""
        plan = work.plan
        reserve = partial(
            self._ledger.reserve,
            plan.size_bytes,
            teacher_id=plan.teacher.teacher_id,
            session_id=work.job.session_id,
        )
        return PayloadRoom(size_bytes=plan.size_bytes, take=reserve, ledger=self._ledger)

    def _room(self, extent: Extent, *, on_device: bool) -> WriterRoom:
        if on_device:
            return DeviceRoom(self._slabs.find_on_device(extent.slab_id), extent)
        return HostRoom(self._slabs.room(extent))
