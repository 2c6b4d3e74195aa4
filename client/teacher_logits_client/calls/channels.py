"""Channels: the client's connections to its server, and whether anybody serves at their end.

Two of them, so that bulk does not stand in the way of control. Proxies of the environment are
ignored, and connections are this client's own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2

from teacher_logits.errors import NotAvailable, RequestInvalidError, ServerUnreachableError
from teacher_logits_client.calls.failures import Waiting, error_of

if TYPE_CHECKING:
    from teacher_logits_client.config import Address

_SERVICE = "teacher_logits.v1.TeacherLogitsService"
_WATCH_HEALTH = "/grpc.health.v1.Health/Watch"

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# A host that vanished shows by its silence; a Unix socket's peer cannot vanish unseen. The
# server takes pings every 5 s and more.
_TCP_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Channels:
    """One channel for control, one for bulk."""

    def __init__(self, address: Address) -> None:
        """Make the channels; nothing is tried before the first call."""
        self._address = address
        options = _OPTIONS if address.path else _OPTIONS + _TCP_OPTIONS
        self.control = grpc.insecure_channel(address.target, options)
        self.bulk = grpc.insecure_channel(address.target, options)

    def close(self) -> None:
        """Close both; calls under way are cancelled."""
        self.control.close()
        self.bulk.close()

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server serves: it may be loading its teacher, or not be there yet.

        Raises:
            ServerUnreachableError: nobody answers at the address within ``timeout`` seconds.
            NotAvailable: it answers, and does not serve by then.
            RequestInvalidError: it is a server of another kind.
        """
        until = time.monotonic() + timeout
        try:
            grpc.channel_ready_future(self.control).result(timeout)
        except grpc.FutureTimeoutError:
            raise self._unreachable(timeout) from None
        waiting = Waiting(what="its health", address=self._address, seconds=timeout)
        watch = self.control.unary_stream(
            _WATCH_HEALTH,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(
            health_pb2.HealthCheckRequest(service=_SERVICE),
            timeout=max(0.001, until - time.monotonic()),
        )
        try:
            for answer in watch:
                if answer.status == answer.SERVING:
                    return
                if answer.status == answer.SERVICE_UNKNOWN:
                    raise RequestInvalidError(
                        f"the server at {self._address} is no teacher-logits server",
                        facts={"address": str(self._address)},
                    )
        except grpc.RpcError as error:
            if watch.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise error_of(error, waiting) from error
        finally:
            watch.cancel()
        raise NotAvailable(
            f"the server at {self._address} answers, and did not serve within {timeout:.3g} s: it "
            "is loading its teacher (wait longer with connect(timeout=...)) or shutting down",
            facts={"address": str(self._address), "deadline_seconds": timeout},
        )

    def _unreachable(self, timeout: float) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"nobody answers at {self._address} within {timeout:.3g} s: is the server running, "
            "and is this its address?",
            facts={"address": str(self._address), "deadline_seconds": timeout},
        )
