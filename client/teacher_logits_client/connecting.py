"""Connecting: from an address to a client of the server that answers there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.calls import Calls
from teacher_logits_client.client import Client
from teacher_logits_client.config import DEFAULT_TIMEOUT_SECONDS, check_timeout, find_connection

if TYPE_CHECKING:
    import os

    from teacher_logits.device_memory import DeviceMemory
    from teacher_logits_client.config import Connection
    from teacher_logits_client.credentials import Tls


def connect(
    address: str | os.PathLike[str],
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    insecure: bool = False,
    tls: Tls | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    device_memory: DeviceMemory | None = None,
) -> Client:
    """Connect to a server and wait until it serves.

    Args:
        address: ``unix:/path``, ``host:port`` or ``tls://host:port``; an absolute path alone is a
            Unix socket's.
        timeout: seconds to wait for a server that is not there yet or loads its teacher; and
            the deadline of later handshakes and farewells that are not given their own. Scores
            and payloads are waited for as long as the server's ``default_wait`` says.
        insecure: allow TCP without TLS to an address that is not on this host, or with a token;
            nothing is encrypted.
        tls: how both sides prove themselves over TCP; see ``Tls``.
        token: what the server's ``--token-file`` has; better in a file, as ``token_file``, which
            is read anew when it changes. Both, and ``tls``, may be said by the environment:
            ``TEACHER_LOGITS_TOKEN_FILE``, ``TEACHER_LOGITS_TLS_CA`` and the like.
        device_memory: what drives devices; the machine's CUDA driver where not given, which is
            looked for when a device is first needed.

    Raises:
        ConfigError: the address is none, needs ``tls`` or ``insecure``, or names something that
            is there and is no server's socket, or lets this user not in; a token or certificate
            cannot be used; or TLS is spoken on one side alone, or the server's certificate is not
            to be believed.
        UnknownCallerError: the server asks for a certificate that it believes, and got none.
        ServerUnreachableError: nobody answers there within ``timeout``.
        NotAvailable: a server answers, and does not serve within ``timeout``.
        RequestInvalidError: what answers is no teacher-logits server.
    """
    connection = find_connection(
        address, insecure=insecure, tls=tls, token=token, token_file=token_file
    )
    return connect_to(connection, timeout=timeout, device_memory=device_memory)


def connect_to(
    connection: Connection,
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    device_memory: DeviceMemory | None = None,
) -> Client:
    """Connect to a server that was found already; the rest as for ``connect``."""
    seconds = check_timeout(timeout, what="connect")
    calls = Calls(connection.address, connection.credentials)
    try:
        calls.wait_until_ready(seconds)
    except BaseException:
        calls.close()
        raise
    return Client(calls, timeout=seconds, device_memory=device_memory)
