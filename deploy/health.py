"""Ask a server for its health by the gRPC health protocol (grpc.health.v1).

    python health.py unix:/run/teacher-logits/teacher.sock          is it ready?
    python health.py --alive unix:/run/teacher-logits/teacher.sock  does it live?
    python health.py --tls-ca ca.pem tls://localhost:5555           is it ready, by its port?
    python health.py --wait 900 unix:/run/teacher-logits/...        until it is, 900 s at most

Exit codes: 0 it is SERVING, or with ``--alive`` it answers, whatever it says; 1 it is not, as
while its teacher loads and while it drains, or nobody answers; 2 called wrongly. A supervisor
that ends what does not live asks with ``--alive``, or it would cut every drain short. With
``--wait SECONDS`` it asks every second until 0 is the answer, and says each new one.

Over TCP, TLS is spoken to ``tls://host:port``, and wherever ``--tls-ca``, ``--tls-cert``,
``--tls-key`` or ``--tls-server-name`` is given, or its variable TEACHER_LOGITS_TLS_CA, ...: the
settings of every command that connects. Beside the server its own ``--tls-cert`` does as
``--tls-ca``; with the name in it, where the address is another. Health is asked without a token.

Imports neither torch nor the service, so that asking every few seconds costs little.
"""

from __future__ import annotations

import argparse
import os
import ssl
import stat
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

CHECK = "/grpc.health.v1.Health/Check"
TIMEOUT_SECONDS = 4.0
PAUSE_SECONDS = 1.0
TLS = "tls://"
UNIX = ("unix:", "/")
FILES = ("ca", "cert", "key")


def status_of(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    timeout: float = TIMEOUT_SECONDS,
) -> str:
    """Return what the whole server at ``address`` says of itself, such as ``"SERVING"``.

    Raises:
        grpc.RpcError: nobody answered within ``timeout`` seconds.
    """
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    if credentials is None:
        channel = grpc.insecure_channel(address, options)
    else:
        if server_name:
            options.append(("grpc.ssl_target_name_override", server_name))
        channel = grpc.secure_channel(address, credentials, options)
    with channel:
        check = channel.unary_unary(
            CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(health_pb2.HealthCheckRequest(), timeout=timeout)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def main(arguments: list[str]) -> int:
    """Say how the server is, and return the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    address = given.address.removeprefix(TLS)
    if not address or (address != given.address and address.startswith(UNIX)):
        parser.error(f"{given.address!r} is no address: unix:/path, host:port or tls://host:port")
    is_tls = given.address.startswith(TLS) or bool(given.server_name)
    is_tls = is_tls or any(getattr(given, name) for name in FILES)
    try:
        is_unix = address.startswith(UNIX)
        credentials = None if is_unix or not is_tls else _credentials(given)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"health.py: {error}\n")
        return 2
    if address.startswith("/"):
        address = f"unix:{address}"
    until, last = time.monotonic() + given.wait, ""
    while True:
        code, said = _ask(address, credentials, given)
        if said != last:
            sys.stdout.write(f"{said}\n")
            sys.stdout.flush()
        if code == 0 or time.monotonic() + PAUSE_SECONDS > until:
            return code
        last = said
        time.sleep(PAUSE_SECONDS)


def _ask(
    address: str, credentials: grpc.ChannelCredentials | None, given: argparse.Namespace
) -> tuple[int, str]:
    """Ask once: the exit code, and what there is to say."""
    try:
        status = status_of(address, credentials=credentials, server_name=given.server_name)
    except grpc.RpcError as error:
        why = f" ({error.details()})" if credentials is not None else ""
        return 1, f"no answer from {address}: {error.code().name}{why}"
    return 0 if given.alive or status == "SERVING" else 1, status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="health.py", description=__doc__.partition("\n")[0])
    parser.add_argument("address", help="unix:/path, host:port or tls://host:port")
    parser.add_argument("--alive", action="store_true", help="exit with 0 if it answers at all")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="ask that long")
    for name in (*FILES, "server_name"):
        parser.add_argument(
            f"--tls-{name.replace('_', '-')}",
            dest=name,
            metavar="NAME" if name == "server_name" else "FILE",
            default=os.environ.get(f"TEACHER_LOGITS_TLS_{name.upper()}", ""),
        )
    return parser


def _credentials(given: argparse.Namespace) -> grpc.ChannelCredentials:
    """Return what TLS is spoken with.

    Raises:
        OSError, ValueError: a file cannot be read, or holds nothing of its kind; a certificate
            without its key, or the reverse; a key that other users may read.
    """
    if bool(given.cert) != bool(given.key):
        raise ValueError("--tls-cert and --tls-key go together: give both")
    ca = given.ca or ssl.get_default_verify_paths().cafile
    context = ssl.create_default_context(cafile=ca)  # gRPC takes anything, and then never connects
    if given.key:
        mode = stat.S_IMODE(Path(given.key).stat().st_mode)
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ValueError(f"--tls-key {given.key} is open to other users (mode {mode:04o})")
        context.load_cert_chain(given.cert, given.key, password=_no_password)
    read = [Path(path).read_bytes() if path else None for path in (ca, given.key, given.cert)]
    return grpc.ssl_channel_credentials(*read)


def _no_password() -> str:
    raise ValueError("the key of --tls-key has a password")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
