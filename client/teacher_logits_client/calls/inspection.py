"""What an operator sees of a running server, and takes back by force.

``inspect_server`` asks and changes nothing; ``reclaim`` ends leases whoever reads there. What
comes back are the contract's ``views``; ``inspect_view`` writes them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from teacher_logits.errors import ServerUnreachableError
from teacher_logits.v1 import operator_service_pb2 as messages
from teacher_logits.v1 import operator_service_pb2_grpc
from teacher_logits.wire.views import reclaimed_from_wire, server_view_from_wire
from teacher_logits_client.calls.channels import Channels, check_socket
from teacher_logits_client.calls.failures import Waiting, error_of
from teacher_logits_client.calls.shut_sockets import shut_finding
from teacher_logits_client.calls.tls_findings import tls_finding
from teacher_logits_client.config import Connection
from teacher_logits_client.credentials import NO_CREDENTIALS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.addresses import Address
    from teacher_logits.views import Reclaimed, ServerView
    from teacher_logits_client.calls.shown import Metadata
    from teacher_logits_client.credentials import Credentials


def inspect_server(
    address: Address, *, timeout: float, credentials: Credentials = NO_CREDENTIALS
) -> ServerView:
    """Ask a server what it holds. A server that drains answers too.

    Raises:
        ConfigError: what is at its path can be no server, or see ``tls_findings``.
        UnknownCallerError, NotAllowedError: the token shown is no operator's.
        ServerUnreachableError: nobody answers at the address.
        DeadlinePassedError: it did not answer within ``timeout`` seconds.
        RequestInvalidError: what answers is no teacher-logits server.
    """
    connection = Connection(address=address, credentials=credentials)
    with _asking(connection, what="an inspection", timeout=timeout) as (stub, shown):
        reply = stub.Inspect(messages.InspectRequest(), timeout=timeout, metadata=shown)
    return server_view_from_wire(reply)


def reclaim(
    address: Address,
    *,
    session_id: str = "",
    lease_id: str = "",
    quarantined: bool = False,
    teacher_id: str = "",
    timeout: float,
    credentials: Credentials = NO_CREDENTIALS,
) -> Reclaimed:
    """End a session with its leases, one lease, or all that is in quarantine, by force.

    Or retire what is left of a published teacher that everybody has left.

    Raises:
        SessionExpiredError, LeaseLostError, EpochChangedError, UnknownTeacherError: there is no
            such session, lease or teacher.
        NotAllowedError: the teacher has publishers or students; or see ``inspect_server``.
        RequestInvalidError: none of the four was named.
        ConfigError, ServerUnreachableError, DeadlinePassedError: as for ``inspect_server``.
    """
    request = messages.ReclaimRequest()
    if session_id:
        request.session_id = session_id
    elif lease_id:
        request.lease_id = lease_id
    elif teacher_id:
        request.teacher_id = teacher_id
    else:
        request.quarantined = quarantined
    connection = Connection(address=address, credentials=credentials)
    with _asking(connection, what="a reclaim", timeout=timeout) as (stub, shown):
        return reclaimed_from_wire(stub.Reclaim(request, timeout=timeout, metadata=shown))


@contextmanager
def _asking(
    connection: Connection, *, what: str, timeout: float
) -> Iterator[tuple[operator_service_pb2_grpc.OperatorServiceStub, Metadata]]:
    check_socket(connection.address.path)
    channels = Channels(connection.address, connection.credentials)
    waiting = Waiting(what=what, address=connection.address, seconds=timeout)
    try:
        stub = operator_service_pb2_grpc.OperatorServiceStub(channels.control)
        yield stub, channels.shown.metadata()
    except grpc.RpcError as error:
        raised = error_of(error, waiting)
        if isinstance(raised, ServerUnreachableError):
            raised = (
                shut_finding(connection.address, timeout=timeout)
                or tls_finding(connection.address, connection.credentials.tls, timeout=timeout)
                or raised
            )
        raise raised from None
    finally:
        channels.close()
