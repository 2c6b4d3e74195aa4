"""Connecting: from an address to a client of the server that answers there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits_client.calls import Calls
from teacher_logits_client.client import Client
from teacher_logits_client.config import DEFAULT_TIMEOUT_SECONDS, check_timeout, parse_address

if TYPE_CHECKING:
    import os

    from teacher_logits.device_memory import DeviceMemory


def connect(
    address: str | os.PathLike[str],
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    insecure: bool = False,
    device_memory: DeviceMemory | None = None,
) -> Client:
    """Connect to a server and wait until it serves.

    Args:
        address: ``unix:/path`` or ``host:port``; an absolute path alone is a Unix socket's.
        timeout: seconds to wait for a server that is not there yet or loads its teacher; and
            the deadline of later handshakes and farewells that are not given their own. Scores
            and payloads are waited for as long as the server's ``default_wait`` says.
        insecure: allow an address that is not on this host; nothing is encrypted.
        device_memory: what drives devices; the machine's CUDA driver where not given, which is
            looked for when a device is first needed.

    Raises:
        ConfigError: the address is none, needs ``insecure``, or names something that is there
            and is no server's socket.
        ServerUnreachableError: nobody answers there within ``timeout``.
        NotAvailable: a server answers, and does not serve within ``timeout``.
        RequestInvalidError: what answers is no teacher-logits server.
    """
    where = parse_address(address, insecure=insecure)
    seconds = check_timeout(timeout, what="connect")
    calls = Calls(where)
    try:
        calls.wait_until_ready(seconds)
    except BaseException:
        calls.close()
        raise
    return Client(calls, timeout=seconds, device_memory=device_memory)
