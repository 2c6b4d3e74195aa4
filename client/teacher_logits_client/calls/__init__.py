"""Calls: the client's end of gRPC, one method a call, in plain Python on both sides.

Two channels, so that bulk does not stand in the way of control. Proxies of the environment
are ignored, connections are this client's own, every call has a deadline, and what fails is
raised as an error of the tree (``invoking``, ``failures``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from teacher_logits import tracing
from teacher_logits.protocol import OURS
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.v1 import bulk_service_pb2, scoring_service_pb2_grpc
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits.v1 import teacher_logits_service_pb2_grpc as stubs
from teacher_logits.wire import student_to_wire, transport_to_wire
from teacher_logits.wire.objects import holder_from_wire
from teacher_logits.wire.payloads import lease_from_wire
from teacher_logits.wire.protocol import spoken_to_wire
from teacher_logits.wire.session import session_from_wire
from teacher_logits.wire.transport import probe_from_wire, refusal_to_wire
from teacher_logits_client.calls.channels import Channels
from teacher_logits_client.calls.direct_streams import ending
from teacher_logits_client.calls.failures import Waiting, stream_error_of
from teacher_logits_client.calls.invoking import LEAST_SECONDS, Invoker
from teacher_logits_client.calls.objects import ObjectCalls
from teacher_logits_client.calls.opened import OpenedSession
from teacher_logits_client.calls.pending import PendingLease
from teacher_logits_client.calls.registry import RegistryCalls
from teacher_logits_client.calls.steps import PendingStep
from teacher_logits_client.calls.told import Telling
from teacher_logits_client.credentials import NO_CREDENTIALS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from teacher_logits.addresses import Address
    from teacher_logits.profiles import StudentProfile
    from teacher_logits.terms import LeaseTerms, SessionTerms
    from teacher_logits.transport import Refusal, Transport
    from teacher_logits_client.calls.pending import Scored
    from teacher_logits_client.calls.scoring import Scoring
    from teacher_logits_client.credentials import Credentials

_READ_PAYLOAD = "/teacher_logits.v1.BulkService/ReadPayload"
_OPEN_SESSION = "/teacher_logits.v1.TeacherLogitsService/OpenSession"
_OPENING = "the opening of a session"


class Calls:
    """Everything a client calls over gRPC."""

    def __init__(self, address: Address, credentials: Credentials = NO_CREDENTIALS) -> None:
        """Make the channels; nothing is tried before the first call."""
        self.address, self.credentials = address, credentials
        self._channels = Channels(address, credentials)
        self._metadata = self._channels.shown.metadata
        control, bulk = self._channels.control, self._channels.bulk
        self._service = stubs.TeacherLogitsServiceStub(control)
        opened = messages.OpenSessionResponse
        self._open_session: Telling[messages.OpenSessionRequest, messages.OpenSessionResponse]
        self._open_session = Telling(control, _OPEN_SESSION, reply=opened, what=_OPENING)
        self._scoring = scoring_service_pb2_grpc.ScoringServiceStub(control)
        self._read = bulk.unary_stream(
            _READ_PAYLOAD,
            request_serializer=bulk_service_pb2.ReadPayloadRequest.SerializeToString,
            response_deserializer=bytes,
        )
        self._invoke = invoke = Invoker(self._channels, address=address)
        self.registry = RegistryCalls(self._channels, address=address, invoke=invoke)
        self.objects = ObjectCalls(self._channels, invoke=invoke)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._channels.is_closed

    def close(self) -> None:
        """Close the channels; calls under way are cancelled."""
        self._channels.close()

    def keep_secret(self, session_id: str, secret: str) -> None:
        """Have the calls of a session show what came over its broker line, from now on."""
        self._channels.shown.keep(session_id, secret)

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server serves; see ``Channels.wait_until_ready``."""
        self._channels.wait_until_ready(timeout)

    def open_session(
        self, profile: StudentProfile, *, request_id: str, timeout: float
    ) -> OpenedSession:
        """Be admitted, or raise every broken rule."""
        reply = self._invoke(
            self._open_session,
            messages.OpenSessionRequest(
                request_id=request_id, profile=student_to_wire(profile), **spoken_to_wire(OURS)
            ),
            what=_OPENING,
            timeout=timeout,
        )
        return OpenedSession(
            terms=session_from_wire(reply.session),
            broker_path=reply.broker_path,
            nonce=reply.nonce,
            device_probes=tuple(map(probe_from_wire, reply.device_probes)),
            ray_holder=holder_from_wire(reply.ray_holder) if reply.HasField("ray_holder") else None,
        )

    def prove_locality(
        self,
        session_id: str,
        *,
        proofs: Mapping[tuple[Transport, str], bytes],
        failures: Sequence[Refusal],
        timeout: float,
    ) -> SessionTerms:
        """Show what was read, and what could not be; return the settled terms.

        ``proofs`` by transport and the writer whose memory it is; an empty one is the server.
        """
        reply = self._invoke(
            self._service.ProveLocality,
            messages.ProveLocalityRequest(
                session_id=session_id,
                proofs=[
                    messages.LocalityProof(
                        transport=transport_to_wire(transport),
                        writer_id=writer_id or SERVER_WRITER,
                        mac=mac,
                    )
                    for (transport, writer_id), mac in proofs.items()
                ],
                failures=[refusal_to_wire(refusal) for refusal in failures],
            ),
            what="the settlement of a transport",
            timeout=timeout,
        )
        return session_from_wire(reply.session)

    def renew(self, session_id: str, *, timeout: float) -> bool:
        """Renew a session; return whether the server is draining."""
        reply = self._invoke(
            self._service.RenewSession,
            messages.RenewSessionRequest(session_id=session_id),
            what="the renewal of a session",
            timeout=timeout,
        )
        return reply.draining

    def close_session(self, session_id: str, *, timeout: float) -> None:
        """End a session."""
        self._invoke(
            self._service.CloseSession,
            messages.CloseSessionRequest(session_id=session_id),
            what="the end of a session",
            timeout=timeout,
        )

    def acquire(
        self, session_id: str, *, request_id: str, payload_id: str, timeout: float
    ) -> LeaseTerms:
        """Lease a payload."""
        reply = self._invoke(
            self._service.AcquirePayload,
            messages.AcquirePayloadRequest(
                session_id=session_id, request_id=request_id, payload_id=payload_id
            ),
            what=f"payload {payload_id}",
            timeout=timeout,
        )
        return lease_from_wire(reply.lease)

    def acquire_step(
        self, session_id: str, *, request_id: str, step: int, timeout: float
    ) -> PendingStep:
        """Ask for all that a step holds of a rank's rows, and do not wait for it."""
        seconds = max(LEAST_SECONDS, timeout)
        waiting = Waiting(what=f"step {step}", address=self.address, seconds=seconds)
        request = messages.AcquireStepRequest(
            session_id=session_id, request_id=request_id, step=step
        )
        with self._invoke.open():
            call = self._service.AcquireStep.future(
                request, timeout=seconds, metadata=self._metadata(session_id)
            )
        return PendingStep(call, waiting, channels=self._channels)

    def release(
        self,
        session_id: str,
        lease_id: str,
        *,
        timeout: float,
        request_id: str = "",
        unread: bool = False,
    ) -> None:
        """Return a lease; see ``Line.release``."""
        self._invoke(
            self._service.ReleasePayload,
            messages.ReleasePayloadRequest(
                session_id=session_id, lease_id=lease_id, request_id=request_id, unread=unread
            ),
            what="the return of a lease",
            timeout=timeout,
        )

    def score(self, scoring: Scoring, *, what: str, timeout: float) -> PendingLease:
        """Send a scoring request, and do not wait for it."""
        waiting = Waiting(what=what, address=self.address, seconds=timeout)
        call: Scored
        facts = {"rows": len(scoring.row_lengths)}
        with self._invoke.open(), tracing.under(span := tracing.begin("score", facts)):
            shown = self._metadata(scoring.session_id)
            if scoring.ids_per_position:
                call = self._scoring.ScoredIds.future(scoring.ids_message(), timeout, shown)
            else:
                call = self._scoring.Score.future(scoring.message(), timeout, shown)
        if span is not None:
            call.add_done_callback(lambda _: span.end())
        request_id = scoring.request_id
        return PendingLease(call, waiting, channels=self._channels, request_id=request_id)

    def read_payload(
        self,
        session_id: str,
        lease_id: str,
        offset_bytes: int,
        *,
        timeout: float,
        as_written: bool = False,
    ) -> Iterator[bytes]:
        """Yield the chunks of a leased payload from an offset on, as they came.

        ``as_written`` whatever the lease's encoding.

        Raises:
            SessionExpiredError: this client was closed, before or meanwhile.
            StreamBrokenError: the connection broke; what came counts.
        """
        waiting = Waiting(
            what=f"the stream of lease {lease_id}", address=self.address, seconds=timeout
        )
        request = bulk_service_pb2.ReadPayloadRequest(
            session_id=session_id,
            lease_id=lease_id,
            offset_bytes=offset_bytes,
            as_written=as_written,
        )
        try:
            shown = self._metadata(session_id)
            stream = self._read(request, timeout=max(LEAST_SECONDS, timeout), metadata=shown)
            with ending(stream):
                yield from stream
        except (grpc.RpcError, ValueError) as error:
            raise stream_error_of(
                error, waiting, session_id=session_id, is_closed=self.is_closed
            ) from None
