"""The way to a server over TCP, a finding a stage: its name, its port, TLS, the certificate.

Each stage is tried as far as the one before let it. Judging is apart from trying, so that what
is far or wrong can be told without being there.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits_client.doctor.certificates import Handshake, handshake_findings, shake
from teacher_logits_client.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from teacher_logits.errors import Fact
    from teacher_logits_client.config import Connection


@dataclass(frozen=True, kw_only=True)
class Reached:
    """How far one came. ``addresses`` are a name's; errors are empty where a stage went well."""

    host: str
    port: int
    addresses: tuple[str, ...] = ()
    lookup_error: str = ""
    connected_to: str = ""
    connect_error: str = ""
    handshake: Handshake | None = None


def reach(connection: Connection, *, timeout: float) -> Reached:
    """Look a server's name up, connect to its port, and try TLS."""
    host, port = connection.address.host, connection.address.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Reached(host=host, port=port, lookup_error=_said(error))
    addresses = tuple(dict.fromkeys(str(each[4][0]) for each in found))
    error_text = ""
    for each in addresses:
        try:
            socket.create_connection((each, port), timeout).close()
        except OSError as error:
            error_text = f"{each}: {_said(error)}"
            continue
        return Reached(
            host=host,
            port=port,
            addresses=addresses,
            connected_to=each,
            handshake=shake(connection, timeout=timeout),
        )
    return Reached(host=host, port=port, addresses=addresses, connect_error=error_text)


def reach_findings(reached: Reached) -> list[Finding]:
    """Judge how far one came; a stage that was not tried has no finding."""
    findings = [lookup_finding(reached)]
    if not reached.lookup_error:
        findings.append(tcp_finding(reached))
    if reached.handshake is not None:
        findings += handshake_findings(reached.handshake)
    return findings


def lookup_finding(reached: Reached) -> Finding:
    """Judge whether the server's name is known."""
    facts: dict[str, Fact] = {"host": reached.host, "addresses": ",".join(reached.addresses)}
    if reached.lookup_error:
        return Finding(
            name="dns",
            verdict=Verdict.FAIL,
            message=f"{reached.host} is not known here: {reached.lookup_error}",
            cure="mend the name, or the resolver (/etc/resolv.conf); in Kubernetes a service is "
            "NAME.NAMESPACE.svc",
            facts=facts,
        )
    message = f"{reached.host} is {', '.join(reached.addresses)}"
    return Finding(name="dns", verdict=Verdict.OK, message=message, facts=facts)


def tcp_finding(reached: Reached) -> Finding:
    """Judge whether somebody takes connections at the port."""
    facts: dict[str, Fact] = {"port": reached.port, "connected_to": reached.connected_to}
    if reached.connect_error:
        return Finding(
            name="tcp",
            verdict=Verdict.FAIL,
            message=f"no connection to port {reached.port} of {reached.connect_error}",
            cure="refused: start the server there, with --listen and an address that is reached "
            "from here; no answer: open the port (firewall, NetworkPolicy); in another network "
            "namespace 127.0.0.1 is another machine's",
            facts=facts,
        )
    message = f"port {reached.port} of {reached.connected_to} takes connections"
    return Finding(name="tcp", verdict=Verdict.OK, message=message, facts=facts)


def _said(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
