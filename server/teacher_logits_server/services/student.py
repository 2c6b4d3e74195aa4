"""The service of student ranks: admission, proof, renewal, leases, steps; the first three are
publishers' too.

A student that comes before its teacher waits for it (``opening``), and so does a step that is asked
for before it is complete: as long as the call's deadline and ``default_wait`` allow.

``renew``, ``acquire`` and ``release`` are one implementation for two ways in: RPCs here, and
the same messages on a broker line (``line``).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import (
    DeadlinePassedError,
    NoCommonTransportError,
    RequestInvalidError,
    SessionRefusedError,
)
from teacher_logits.protocol import OURS, agree
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import Transport
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits.v1 import teacher_logits_service_pb2_grpc as stubs
from teacher_logits.wire import check_count, student_from_wire, transport_from_wire
from teacher_logits.wire.objects import holder_to_wire
from teacher_logits.wire.payloads import lease_to_wire
from teacher_logits.wire.protocol import spoken_from_wire
from teacher_logits.wire.session import session_to_wire
from teacher_logits.wire.steps import grant_to_wire
from teacher_logits.wire.transport import probe_to_wire, refusal_from_wire
from teacher_logits_server.access import owner
from teacher_logits_server.metrics.instruments import Instruments
from teacher_logits_server.services.opening import Opening, teller
from teacher_logits_server.services.session_log import (
    PUBLISHER,
    log_opened,
    log_refused,
    log_settled,
    who_asks,
)

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import SessionTerms, StepGrant
    from teacher_logits.v1 import ray_pb2
    from teacher_logits_server.exporters.ray_object import RayObjectExporter
    from teacher_logits_server.ledger import Ledger
    from teacher_logits_server.services.publishing import PublisherCalls
    from teacher_logits_server.services.waiting import Waiting

MAX_FAILURES = 1024
"""Proofs, or failures, of one call: a few, and one a writer of device memory."""

_log = logging.getLogger(__name__)


class StudentService(stubs.TeacherLogitsServiceServicer):
    """Admits student ranks and lends them payloads.

    Args:
        publishing: hears of seals before a publisher's session is closed.
        broker_path: where the broker listens; empty where there is none.
        objects: has the holder of references; None where no Ray cluster was joined.
        instruments: what sessions settle without is counted in.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        publishing: PublisherCalls,
        waiting: Waiting,
        broker_path: str,
        objects: RayObjectExporter | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        self._instruments = instruments or Instruments()
        self._ledger = ledger
        self._publishing = publishing
        self._waiting = waiting
        self._broker_path = broker_path
        self._objects = objects

    async def OpenSession(
        self,
        request: messages.OpenSessionRequest,
        context: ServicerContext[messages.OpenSessionRequest, messages.OpenSessionResponse],
    ) -> messages.OpenSessionResponse:
        """Admit a student rank, or refuse it with every rule that it breaks.

        For what it waits see ``opening``.
        """
        # First of all: another release's words are not known here, and its version says why.
        agreed = agree(spoken_from_wire(request), OURS)
        profile = student_from_wire(request.profile)
        try:
            admit = partial(
                self._ledger.open_session,
                request_id=request.request_id,
                protocol_version=agreed.version,
                features=agreed.features,
                profile=profile,
                owner=owner(),
            )
            opening = Opening(self._ledger, admit, teller(context))
            opened = await opening.wait(self._waiting, self._waiting.seconds_for(context))
        except SessionRefusedError as error:
            log_refused(who_asks(profile), error)
            raise
        log_opened(who_asks(profile), opened)
        return messages.OpenSessionResponse(
            session=session_to_wire(opened.terms),
            broker_path=self._broker_path,
            nonce=opened.nonce,
            device_probes=map(probe_to_wire, opened.probes),
            ray_holder=self._ray_holder(profile),
        )

    def _ray_holder(self, profile: StudentProfile) -> ray_pb2.RayHolder | None:
        """Return who a student that wants objects is to ask for a challenge."""
        if self._objects is None or Transport.RAY_OBJECT not in profile.transports:
            return None
        return holder_to_wire(self._objects.holder)

    async def ProveLocality(
        self,
        request: messages.ProveLocalityRequest,
        context: ServicerContext[messages.ProveLocalityRequest, messages.ProveLocalityResponse],
    ) -> messages.ProveLocalityResponse:
        """Settle the session's transports by what was proven, once there is who writes for it."""
        who = self._ledger.describe(request.session_id)
        check_count(request.failures, MAX_FAILURES, field="failures")
        check_count(request.proofs, MAX_FAILURES, field="proofs")
        proofs, device_proofs = _proofs(request)
        failures = [refusal_from_wire(failure) for failure in request.failures]

        async def look() -> SessionTerms | None:
            patience = self._waiting.seconds_for(context)
            if self._ledger.lacks_writers(request.session_id, patience=patience):
                return None
            before = self._ledger.settlements(request.session_id)
            terms = self._ledger.prove_locality(
                request.session_id, proofs=proofs, failures=failures, device_proofs=device_proofs
            )
            if terms.settlements != before:  # not where the call was repeated
                log_settled(who, terms)
                self._instruments.settled(terms.settlements)
            return terms

        try:
            terms = await self._waiting.until(
                look,
                bell=self._waiting.teachers,
                seconds=self._waiting.seconds_for(context),
                too_late=_writers_died,
                session_id=request.session_id,
            )
        except (SessionRefusedError, NoCommonTransportError) as error:
            log_refused(who, error)
            raise
        return messages.ProveLocalityResponse(session=session_to_wire(terms))

    async def RenewSession(
        self,
        request: messages.RenewSessionRequest,
        context: ServicerContext[messages.RenewSessionRequest, messages.RenewSessionResponse],
    ) -> messages.RenewSessionResponse:
        """Extend a session that has not ended."""
        return renew(self._ledger, request)

    async def CloseSession(
        self,
        request: messages.CloseSessionRequest,
        context: ServicerContext[messages.CloseSessionRequest, messages.CloseSessionResponse],
    ) -> messages.CloseSessionResponse:
        """End a session; doing so twice is fine."""
        who = self._ledger.describe(request.session_id)
        self._publishing.hear_seals(request.session_id)
        if self._ledger.close_session(request.session_id):
            what = "publisher closed" if who.get("kind") == PUBLISHER else "session closed"
            _log.info(what, extra={"facts": {"session_id": request.session_id, **who}})
        return messages.CloseSessionResponse()

    async def AcquirePayload(
        self,
        request: messages.AcquirePayloadRequest,
        context: ServicerContext[messages.AcquirePayloadRequest, messages.AcquirePayloadResponse],
    ) -> messages.AcquirePayloadResponse:
        """Lease a payload that is leased already."""
        return acquire(self._ledger, request)

    async def AcquireStep(
        self,
        request: messages.AcquireStepRequest,
        context: ServicerContext[messages.AcquireStepRequest, messages.AcquireStepResponse],
    ) -> messages.AcquireStepResponse:
        """Lease all that a step holds of the rank's rows, once it is complete."""

        async def look() -> StepGrant | None:
            return self._ledger.take_step(request.session_id, request.request_id, request.step)

        def too_late(waited: float) -> DeadlinePassedError:
            lacking = self._ledger.lacking(request.session_id, request.step)
            return DeadlinePassedError(
                f"step {request.step} is not complete after {span_text(waited)} (the shorter of "
                f"the call's deadline and --default-wait): {lacking}",
                facts={"step": request.step, "waited_seconds": waited},
            )

        grant = await self._waiting.until(
            look,
            bell=self._waiting.steps,
            seconds=self._waiting.seconds_for(context),
            too_late=too_late,
            session_id=request.session_id,
        )
        return messages.AcquireStepResponse(grant=grant_to_wire(grant))

    async def ReleasePayload(
        self,
        request: messages.ReleasePayloadRequest,
        context: ServicerContext[messages.ReleasePayloadRequest, messages.ReleasePayloadResponse],
    ) -> messages.ReleasePayloadResponse:
        """Return a lease; doing so twice is fine."""
        return release(self._ledger, request)


def renew(ledger: Ledger, request: messages.RenewSessionRequest) -> messages.RenewSessionResponse:
    """Extend a session that has not ended."""
    return messages.RenewSessionResponse(draining=ledger.renew(request.session_id))


def acquire(
    ledger: Ledger, request: messages.AcquirePayloadRequest
) -> messages.AcquirePayloadResponse:
    """Lease a payload that is leased already."""
    lease = ledger.acquire(
        session_id=request.session_id,
        request_id=request.request_id,
        payload_id=request.payload_id,
    )
    return messages.AcquirePayloadResponse(lease=lease_to_wire(lease))


def release(
    ledger: Ledger, request: messages.ReleasePayloadRequest
) -> messages.ReleasePayloadResponse:
    """Return a lease, or give a request up; doing so twice is fine."""
    is_there = True
    if request.lease_id or not request.request_id:
        is_there = ledger.release(request.session_id, request.lease_id, unread=request.unread)
    if request.request_id and is_there:
        ledger.release_request(request.session_id, request.request_id)
    return messages.ReleasePayloadResponse()


def _proofs(
    request: messages.ProveLocalityRequest,
) -> tuple[dict[Transport, bytes], dict[str, bytes]]:
    """Return what proves the server's own memory, and the device memory of writers."""
    proofs: dict[Transport, bytes] = {}
    device_proofs: dict[str, bytes] = {}
    for proof in request.proofs:
        transport = transport_from_wire(proof.transport)
        if transport is Transport.CUDA_IPC:
            device_proofs[proof.writer_id] = proof.mac
        elif proof.writer_id != SERVER_WRITER:
            raise RequestInvalidError(
                f"a proof of {transport.value} names writer {proof.writer_id[:128]!r}; the one "
                f"writer of it here is {SERVER_WRITER!r}",
                facts={"writer_id": proof.writer_id[:128]},
            )
        else:
            proofs[transport] = proof.mac
    return proofs, device_proofs


def _writers_died(waited: float) -> DeadlinePassedError:
    return DeadlinePassedError(
        "the publishers of all rows of this rank died while it was being admitted, and none has "
        f"come back after {span_text(waited)}: start them, or allow more time",
        facts={"waited_seconds": waited},
    )
