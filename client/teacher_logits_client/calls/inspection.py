"""What an operator sees of a running server, and takes back by force.

``inspect_server`` asks and changes nothing; ``reclaim`` ends leases whoever reads there. What
comes back are the contract's ``views``; ``inspect_view`` writes them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from teacher_logits.v1 import operator_service_pb2 as messages
from teacher_logits.v1 import operator_service_pb2_grpc
from teacher_logits.wire.views import reclaimed_from_wire, server_view_from_wire
from teacher_logits_client.calls.channels import Channels, check_socket
from teacher_logits_client.calls.failures import Waiting, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits.addresses import Address
    from teacher_logits.views import Reclaimed, ServerView


def inspect_server(address: Address, *, timeout: float) -> ServerView:
    """Ask a server what it holds. A server that drains answers too.

    Raises:
        ConfigError: what is at its path can be no server.
        ServerUnreachableError: nobody answers at the address.
        DeadlinePassedError: it did not answer within ``timeout`` seconds.
        RequestInvalidError: what answers is no teacher-logits server.
    """
    with _asking(address, what="an inspection", timeout=timeout) as stub:
        reply = stub.Inspect(messages.InspectRequest(), timeout=timeout)
    return server_view_from_wire(reply)


def reclaim(
    address: Address,
    *,
    session_id: str = "",
    lease_id: str = "",
    quarantined: bool = False,
    teacher_id: str = "",
    timeout: float,
) -> Reclaimed:
    """End a session with its leases, one lease, or all that is in quarantine, by force.

    Or retire what is left of a published teacher that everybody has left.

    Raises:
        SessionExpiredError, LeaseLostError, EpochChangedError, UnknownTeacherError: there is no
            such session, lease or teacher.
        NotAllowedError: the teacher has publishers or students.
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
    with _asking(address, what="a reclaim", timeout=timeout) as stub:
        return reclaimed_from_wire(stub.Reclaim(request, timeout=timeout))


@contextmanager
def _asking(
    address: Address, *, what: str, timeout: float
) -> Iterator[operator_service_pb2_grpc.OperatorServiceStub]:
    check_socket(address.path)
    channels = Channels(address)
    waiting = Waiting(what=what, address=address, seconds=timeout)
    try:
        yield operator_service_pb2_grpc.OperatorServiceStub(channels.control)
    except grpc.RpcError as error:
        raise error_of(error, waiting) from None
    finally:
        channels.close()
