"""Channels: the client's connections to its server, and whether anybody serves at their end.

Two of them, so that bulk does not stand in the way of control. Proxies of the environment are
ignored, and connections are this client's own.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2

from teacher_logits.clock import span_text
from teacher_logits.errors import (
    ConfigError,
    NotAvailable,
    RequestInvalidError,
    ServerUnreachableError,
)
from teacher_logits_client.calls.direct_streams import CHANNEL_OPTIONS
from teacher_logits_client.calls.failures import Waiting, error_of
from teacher_logits_client.calls.shown import Shown
from teacher_logits_client.calls.shut_sockets import shut_finding
from teacher_logits_client.calls.tls_findings import tls_finding
from teacher_logits_client.credentials import NO_CREDENTIALS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits.addresses import Address
    from teacher_logits.errors import Fact
    from teacher_logits_client.credentials import Credentials, Tls

_SERVICE = "teacher_logits.v1.TeacherLogitsService"
_READY = (grpc.ChannelConnectivity.READY,)
_WATCH_HEALTH, _CHECK_HEALTH = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
_LOOK_SECONDS = 0.25

MAX_RECONNECT_SECONDS = 1.2
"""The longest that a channel whose server was not there waits before it tries again."""

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # gRPC varies it by a fifth
]
# A host that vanished shows by its silence; a Unix socket's peer cannot vanish unseen. The
# server takes pings every 5 s and more.
_TCP_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Channels:
    """One channel for control, one for bulk; ``shown`` is what their calls show."""

    def __init__(self, address: Address, credentials: Credentials = NO_CREDENTIALS) -> None:
        """Make the channels; nothing is tried before the first call.

        Raises:
            ConfigError: a file of ``credentials.tls`` is not what it should be.
        """
        self._address = address
        self._tls = credentials.tls
        self.shown = Shown(credentials)
        self.is_closed = False
        options = _OPTIONS if address.path else _OPTIONS + _TCP_OPTIONS
        connect = partial(_channel, address, credentials.tls)
        self.control = connect(options)
        self.bulk = connect([*options, *CHANNEL_OPTIONS])

    def close(self) -> None:
        """Close both; calls under way are cancelled."""
        self.is_closed = True
        self.control.close()
        self.bulk.close()

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server serves: it may be loading its teacher, or not be there yet.

        Raises:
            ConfigError: what is at its path can be no server, or keeps this user out; see
                ``check_socket`` and ``shut_sockets``.
            ServerUnreachableError: nobody answers at the address within ``timeout`` seconds.
            NotAvailable: it answers, and does not serve by then.
            RequestInvalidError: it is a server of another kind.
        """
        until = time.monotonic() + timeout
        check_socket(self._address.path)
        self._await_connection(timeout, until)
        waiting = Waiting(what="its health", address=self._address, seconds=timeout)
        try:
            for status in self._statuses(until):
                if status == health_pb2.HealthCheckResponse.SERVING:
                    return
                if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
                    raise RequestInvalidError(
                        f"the server at {self._address} is no teacher-logits server",
                        facts={"address": str(self._address)},
                    )
        except grpc.RpcError as error:
            if _code_of(error) is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise error_of(error, waiting, is_closed=self.is_closed) from None
        raise NotAvailable(
            f"the server at {self._address} answers, and did not serve within "
            f"{span_text(timeout)}: it is loading its teacher (wait longer with "
            "connect(timeout=...)) or shutting down",
            facts={"address": str(self._address), "deadline_seconds": timeout},
        )

    def _statuses(self, until: float) -> Iterator[int]:
        """Yield what the server's health is, with each change.

        Where as many watch it as may, it is looked at instead, as the server says.
        """
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        kinds = request.__class__.SerializeToString, health_pb2.HealthCheckResponse.FromString
        left = max(0.001, until - time.monotonic())
        watch = self.control.unary_stream(_WATCH_HEALTH, *kinds)(request, timeout=left)
        try:
            yield from (answer.status for answer in watch)
        except grpc.RpcError as error:
            if _code_of(error) is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
        finally:
            watch.cancel()
        check = self.control.unary_unary(_CHECK_HEALTH, *kinds)
        while (left := until - time.monotonic()) > 0:
            yield check(request, timeout=left).status
            time.sleep(min(_LOOK_SECONDS, left))

    def _await_connection(self, timeout: float, until: float) -> None:
        """Wait until somebody answers; what TLS or a socket's mode forbids is no matter of time."""
        states: SimpleQueue[grpc.ChannelConnectivity] = SimpleQueue()
        self.control.subscribe(states.put, try_to_connect=True)
        try:
            while (state := states.get(timeout=max(0.0, until - time.monotonic()))) not in _READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    left = max(0.001, until - time.monotonic())
                    finding = shut_finding(self._address, timeout=left) or tls_finding(
                        self._address, self._tls, timeout=left
                    )
                    if finding is not None:
                        raise finding
        except Empty:
            raise self._unreachable(timeout) from None
        finally:
            self.control.unsubscribe(states.put)

    def _unreachable(self, timeout: float) -> ServerUnreachableError:
        facts: dict[str, Fact] = {"address": str(self._address), "deadline_seconds": timeout}
        return ServerUnreachableError(
            f"nobody answers at {self._address} within {span_text(timeout)}: is the server "
            "running, and is this its address?",
            facts=facts,
        )


def _channel(address: Address, tls: Tls | None, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    if tls is None or address.is_unix:
        return grpc.insecure_channel(address.target, options)
    files = tls.contents()
    made = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.secure_channel(address.target, made, [*options, *name])


def check_socket(path: str) -> None:
    """Refuse a path at which no server can answer; one where nothing is yet may be waited for.

    Raises:
        ConfigError: a folder or file is there, or a socket of packets, as a broker has.
    """
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode) if path else stat.S_IFSOCK
    except OSError:
        return
    if kind != stat.S_IFSOCK:
        what = "a folder" if kind == stat.S_IFDIR else "no socket"
        raise ConfigError(
            f"{path} is {what}: give the path of the server's own socket, which it writes when it "
            "is ready",
            facts={"path": path},
        )
    if path and _takes_packets(path):
        raise ConfigError(
            f"{path} is a broker's socket, which the client finds by itself: give the address "
            "that the server listens on, as a rule the same path without .broker",
            facts={"path": path},
        )


def _code_of(error: grpc.RpcError) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.Call) else None


def _takes_packets(path: str) -> bool:
    """Whether a socket is of the broker's type; a server's is left undisturbed."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            return probe.connect_ex(path) in (0, errno.EAGAIN)
    except OSError:
        return False
