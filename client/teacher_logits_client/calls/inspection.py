"""What an operator sees of a running server: its sessions, leases, pool and queue at one instant.

Asks and changes nothing. What comes back are the contract's ``views``; ``inspect_view`` writes
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from teacher_logits.v1 import operator_service_pb2, operator_service_pb2_grpc
from teacher_logits.wire_views import server_view_from_wire
from teacher_logits_client.calls.channels import Channels, check_socket
from teacher_logits_client.calls.failures import Waiting, error_of

if TYPE_CHECKING:
    from teacher_logits.views import ServerView
    from teacher_logits_client.config import Address


def inspect_server(address: Address, *, timeout: float) -> ServerView:
    """Ask a server what it holds. A server that drains answers too.

    Raises:
        ConfigError: what is at its path can be no server.
        ServerUnreachableError: nobody answers at the address.
        DeadlinePassedError: it did not answer within ``timeout`` seconds.
        RequestInvalidError: what answers is no teacher-logits server.
    """
    check_socket(address.path)
    channels = Channels(address)
    waiting = Waiting(what="an inspection", address=address, seconds=timeout)
    try:
        reply = operator_service_pb2_grpc.OperatorServiceStub(channels.control).Inspect(
            operator_service_pb2.InspectRequest(), timeout=timeout
        )
    except grpc.RpcError as error:
        raise error_of(error, waiting) from None
    finally:
        channels.close()
    return server_view_from_wire(reply)
