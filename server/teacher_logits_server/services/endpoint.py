"""The endpoint: the gRPC server itself, its addresses, limits and health.

It listens before the teacher is loaded, so that a second server is refused at once and
probes are answered; until ``set_serving`` it is NOT_SERVING, and every other call is told
to come back.
"""

from __future__ import annotations

import dataclasses
import socket
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from teacher_logits.errors import ConfigError
from teacher_logits.selection_rules import MAX_IDS_PER_TOKEN
from teacher_logits_server.interceptors import Guard
from teacher_logits_server.metrics.instruments import Instruments
from teacher_logits_server.services import Services
from teacher_logits_server.services.certificates import server_credentials
from teacher_logits_server.services.counted_calls import CONNECTION_SHARE, CountedCalls
from teacher_logits_server.services.reflecting import reflect
from teacher_logits_server.services.teacher_health import TeacherHealth
from teacher_logits_server.sockets import SocketClaim, audience_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.addresses import Address
    from teacher_logits_server.access import Access
    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.limits import CallLimits
    from teacher_logits_server.sockets import Audience

SERVICE_NAMES = (
    "",
    "teacher_logits.v1.TeacherLogitsService",
    "teacher_logits.v1.RegistryService",
    "teacher_logits.v1.ScoringService",
    "teacher_logits.v1.BulkService",
    "teacher_logits.v1.OperatorService",
    "teacher_logits.v1.ObjectService",
)
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 10_000
MIN_PING_INTERVAL_MS = 5_000
HANDSHAKE_TIMEOUT_MS = 10_000
MAX_METADATA_BYTES = 16 * 1024
MIN_MESSAGE_BYTES = 4 * 1024**2 + 65536
"""A chunk of a streamed payload, of 4 MiB at most, and what stands around it."""
_TOKEN_BYTES = 24
"""A token is 4 bytes; a row of one adds at most 20 of lengths and windows."""
_ID_BYTES = 4
_MOST_BYTES = (1 << 31) - 1
"""What gRPC takes for a limit."""


class Endpoint:
    """The gRPC server of one process.

    Args:
        limits: the longest message that is read at all is sized by the tokens of a request; for
            the calls under way see ``counted_calls``.
        audience: who may connect to its Unix sockets.
        credentials: for its TCP addresses; without any they go without TLS.
        access: who may make which call.
        instruments: what its calls are counted in.
        reflection: whether it tells its schema.

    Raises:
        ConfigError: reflection is not installed.
    """

    def __init__(
        self,
        *,
        limits: CallLimits,
        audience: Audience,
        credentials: grpc.ServerCredentials | None = None,
        access: Access | None = None,
        instruments: Instruments | None = None,
        reflection: bool = False,
    ) -> None:
        instruments = instruments or Instruments()
        self.services = Services()
        self.is_serving = False
        self.audience = audience
        self._credentials = credentials
        self._claims: list[SocketClaim] = []
        self._health = health.HealthServicer()
        self.teachers = TeacherHealth(self._health)
        self._is_ready = False
        self._server = grpc.aio.server(
            handlers=(self.services,),
            interceptors=(
                CountedCalls(
                    max_calls=limits.max_calls,
                    max_watchers=limits.max_watchers,
                    refusals=instruments.refusals,
                ),
                Guard(
                    is_ready=lambda: self._is_ready,
                    access=access,
                    refusals=instruments.refusals,
                    rpcs=instruments.rpcs,
                ),
            ),
            options=_options(limits.max_request_tokens, limits.max_calls),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if reflection:
            reflect(self._server, (*SERVICE_NAMES, "grpc.health.v1.Health"))

    async def listen(self, addresses: Sequence[Address]) -> tuple[Address, ...]:
        """Listen at every address, and return them with the ports that the system chose.

        Raises:
            ConfigError: one is in use, or is none of this machine; stop the endpoint then.
        """
        bound = tuple(self._bind(address) for address in addresses)
        await self._set_health(serving=False)
        await self._server.start()
        return bound

    @property
    def unix_paths(self) -> list[str]:
        """Where its Unix sockets are."""
        return [claim.path for claim in self._claims]

    def open(self) -> None:
        """Let every call in, from now on."""
        self._is_ready = True

    async def set_serving(self, serving: bool) -> None:
        """Say SERVING or NOT_SERVING to whoever asks for the server's health."""
        if serving is not self.is_serving:
            self.is_serving = serving
            await self._set_health(serving=serving)

    async def stop(self, *, grace_seconds: float) -> None:
        """Take no more calls, let those under way finish within the grace, and free the sockets."""
        await self.set_serving(False)
        await self.teachers.end()
        await self._server.stop(grace_seconds)
        for claim in self._claims:
            claim.release()

    def _bind(self, address: Address) -> Address:
        if address.is_unix:
            claim = SocketClaim(address.path, flag="--listen", audience=self.audience)
            self._claims.append(claim)
            self._add_port(address)
            claim.let_in()
            return address
        return dataclasses.replace(address, port=self._add_port(address))

    def _add_port(self, address: Address) -> int:
        try:
            if self._credentials is None or address.is_unix:
                port = self._server.add_insecure_port(str(address))
            else:
                port = self._server.add_secure_port(str(address), self._credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"--listen {address}: {_why_not(address)}",
                facts={"flag": "--listen", "value": str(address)},
            )
        return port

    async def _set_health(self, *, serving: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if serving else answer.NOT_SERVING
        for name in SERVICE_NAMES:
            await self._health.set(name, status)


def endpoint_of(config: ServerConfig, access: Access, instruments: Instruments) -> Endpoint:
    """Return the endpoint that a server was told of.

    Raises:
        ConfigError: its certificate cannot be used, or its group is none.
    """
    return Endpoint(
        limits=config,
        audience=audience_of(config.socket_group, for_everyone=bool(config.allow_uids)),
        credentials=server_credentials(config, instruments),
        access=access,
        instruments=instruments,
        reflection=config.reflection,
    )


def _options(max_request_tokens: int, max_calls: int) -> list[tuple[str, int]]:
    each = _TOKEN_BYTES + MAX_IDS_PER_TOKEN * _ID_BYTES
    longest = min(max(MIN_MESSAGE_BYTES, max_request_tokens * each + 65536), _MOST_BYTES)
    return [
        # On by default, and then a second server shares the port and takes half the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", longest),
        # What a call brings besides its message; gRPC refuses more with RESOURCE_EXHAUSTED.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # Over one connection; its client holds back what it asks beyond that.
        ("grpc.max_concurrent_streams", max(max_calls // CONNECTION_SHARE, 1)),
        # Who connects and says nothing is hung up on.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # A host that vanished shows within a minute; clients may ping as often as every 5 s,
        # with and without calls, and are not sent away for it.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _why_not(address: Address) -> str:
    """Ask the system once more, since gRPC keeps its answer to itself."""
    if address.is_unix:
        return "the socket cannot be made"
    try:
        families = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, place in families:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
    except OSError as error:
        return f"{error.strerror or error}; give it another address"
    return "cannot be listened on"
