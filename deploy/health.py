"""Ask a server for its health by the gRPC health protocol (grpc.health.v1).

    python health.py unix:/run/teacher-logits/teacher.sock          is it ready?
    python health.py --alive unix:/run/teacher-logits/teacher.sock  does it live?

Exit codes: 0 it is SERVING, or with ``--alive`` it answers, whatever it says; 1 it is not, as
while its teacher loads and while it drains, or nobody answers; 2 called wrongly. A supervisor
that ends what does not live asks with ``--alive``, or it would cut every drain short. It speaks no
TLS: a server whose TCP has TLS is asked over its Unix socket.

Imports neither torch nor the service, so that asking every few seconds costs little.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2

CHECK = "/grpc.health.v1.Health/Check"
TIMEOUT_SECONDS = 4.0


def status_of(address: str, *, timeout: float = TIMEOUT_SECONDS) -> str:
    """Return what the whole server at ``address`` says of itself, such as ``"SERVING"``.

    Raises:
        grpc.RpcError: nobody answered within ``timeout`` seconds.
    """
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(health_pb2.HealthCheckRequest(), timeout=timeout)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def main(arguments: list[str]) -> int:
    """Say how the server at the last argument is, and return the exit code."""
    *options, address = arguments or [""]
    if not address or address.startswith("-") or options not in ([], ["--alive"]):
        sys.stderr.write("usage: health.py [--alive] unix:/path | host:port\n")
        return 2
    try:
        status = status_of(address)
    except grpc.RpcError as error:
        sys.stdout.write(f"no answer from {address}: {error.code().name}\n")
        return 1
    sys.stdout.write(f"{status}\n")
    return 0 if options or status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
