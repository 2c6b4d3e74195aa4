"""TLS to a server: whether both speak it, who signed the certificate, its name, and its time.

Each is a finding of its own, so that a certificate that is wrong twice says so twice. For that
the handshake is made without looking at name and time, which are judged from what it shows. A
token is not sent.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from teacher_logits.clock import span_text
from teacher_logits.errors import ConfigError
from teacher_logits_client.calls.tls_findings import tls_finding
from teacher_logits_client.doctor.cures import OF_TLS
from teacher_logits_client.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from teacher_logits.errors import Fact
    from teacher_logits_client.config import Connection
    from teacher_logits_client.credentials import Tls

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the standard library does not name."""
_SOON = timedelta(days=14)
_SOON_SHARE = 5
"""Or the last fifth of a certificate's time, where that is less: short ones are renewed late."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What a server's certificate says. Times are seconds since 1970; ``wanted`` is our name."""

    names: tuple[str, ...]
    wanted: str
    not_before: float
    not_after: float
    now: float


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """What became of TLS. ``reason`` is why it failed, as in ``tls_findings``; empty if it did not.

    ``is_wanted``: whether this side speaks it. ``version`` is that of the protocol.
    """

    is_wanted: bool
    reason: str = ""
    message: str = ""
    version: str = ""
    certificate: Certificate | None = None


def shake(connection: Connection, *, timeout: float) -> Handshake:
    """Try TLS with a server that takes connections, as this side would."""
    tls = connection.credentials.tls
    version, certificate = "", None
    if tls is not None:
        try:
            version, certificate = _seen(connection, tls, timeout)
        except ConfigError as error:
            return Handshake(is_wanted=True, reason=error.reason, message=error.message)
        except OSError:  # what is wrong is told below
            pass
    wrong = tls_finding(connection.address, tls, timeout=timeout)
    return Handshake(
        is_wanted=tls is not None,
        reason="" if wrong is None else str(wrong.facts.get("reason", wrong.reason)),
        message="" if wrong is None else wrong.message,
        version=version,
        certificate=certificate,
    )


def handshake_findings(handshake: Handshake) -> list[Finding]:
    """Judge TLS, and the certificate where one was seen."""
    certificate = handshake.certificate
    if certificate is None:
        return [tls_stage(handshake)]
    return [tls_stage(handshake), name_finding(certificate), time_finding(certificate)]


def tls_stage(handshake: Handshake) -> Finding:
    """Judge whether both sides speak TLS, and believe one another."""
    facts: dict[str, Fact] = {
        "wanted": handshake.is_wanted,
        "version": handshake.version,
        "reason": handshake.reason,
    }
    # Name and time have findings of their own where the certificate was seen.
    is_told = handshake.certificate is not None and handshake.reason in (
        "CERTIFICATE_NAME",
        "CERTIFICATE_EXPIRED",
    )
    if handshake.reason and not is_told:
        return Finding(
            name="tls",
            verdict=Verdict.FAIL,
            message=f"{handshake.reason}: {handshake.message}",
            cure=OF_TLS.get(handshake.reason, "change what the message names"),
            facts=facts,
        )
    if not handshake.is_wanted:
        message = "neither side speaks TLS: nothing on the way is encrypted"
    else:
        message = f"{handshake.version or 'TLS'}, and the certificate is signed by who may"
    return Finding(name="tls", verdict=Verdict.OK, message=message, facts=facts)


def name_finding(certificate: Certificate) -> Finding:
    """Judge whether a certificate is of the server that was asked for."""
    fits = any(matches(name, certificate.wanted) for name in certificate.names)
    names = ", ".join(certificate.names) or "no name"
    return Finding(
        name="certificate_name",
        verdict=Verdict.OK if fits else Verdict.FAIL,
        message=f"the certificate is of {names}, and {certificate.wanted} was asked for",
        cure="" if fits else OF_TLS["CERTIFICATE_NAME"],
        facts={"names": ",".join(certificate.names), "wanted": certificate.wanted},
    )


def time_finding(certificate: Certificate) -> Finding:
    """Judge whether a certificate is good now, and for how long."""
    left = certificate.not_after - certificate.now
    soon = min(
        _SOON.total_seconds(), (certificate.not_after - certificate.not_before) / _SOON_SHARE
    )
    if certificate.now < certificate.not_before:
        verdict, message = Verdict.FAIL, f"is good from {_date(certificate.not_before)} on"
    elif left < 0:
        verdict, message = Verdict.FAIL, f"was good until {_date(certificate.not_after)}"
    else:
        verdict = Verdict.WARN if left < soon else Verdict.OK
        message = f"is good until {_date(certificate.not_after)}, {span_text(left)} from now"
    is_well = verdict is Verdict.OK
    return Finding(
        name="certificate_time",
        verdict=verdict,
        message=f"the certificate {message}",
        cure="" if is_well else OF_TLS["CERTIFICATE_EXPIRED"],
        facts={"not_before": certificate.not_before, "not_after": certificate.not_after},
    )


def matches(name: str, wanted: str) -> bool:
    """Whether a name of a certificate is that of a server: RFC 6125, ``*`` for a whole first label.

    An address matches an address alone.
    """
    try:
        return ipaddress.ip_address(wanted) == ipaddress.ip_address(name)
    except ValueError:
        pass
    name, wanted = name.lower().rstrip("."), wanted.lower().rstrip(".")
    first, dot, rest = name.partition(".")
    if first != "*":
        return name == wanted
    return bool(dot) and "." in rest and wanted.partition(".")[2] == rest


def _seen(connection: Connection, tls: Tls, timeout: float) -> tuple[str, Certificate | None]:
    """Return the protocol and the certificate of a server, whatever its name and time."""
    context = tls.context()
    context.check_hostname = False
    context.verify_flags |= _NO_CHECK_TIME
    address = connection.address
    wanted = tls.server_name or address.host
    with (
        socket.create_connection((address.host, address.port), timeout) as plain,
        context.wrap_socket(plain, server_hostname=wanted) as secured,
    ):
        return secured.version() or "", _read(secured.getpeercert() or {}, wanted)


def _read(shown: ssl._PeerCertRetDictType, wanted: str) -> Certificate | None:
    if not shown:
        return None
    names = shown.get("subjectAltName", ())
    return Certificate(
        names=tuple(str(each[1]) for each in names if each[0] in ("DNS", "IP Address")),
        wanted=wanted,
        not_before=ssl.cert_time_to_seconds(str(shown["notBefore"])),
        not_after=ssl.cert_time_to_seconds(str(shown["notAfter"])),
        now=time.time(),
    )


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
