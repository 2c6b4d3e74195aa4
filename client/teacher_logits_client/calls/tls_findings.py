"""Why a connection does not come about where TLS is, or should be: asked once gRPC has failed.

gRPC says that nobody answers, whatever the cause. Here the handshake is made by hand, and what
fails is named:

    TLS_EXPECTED                  the server speaks TLS, and this client does not
    TLS_NOT_SPOKEN                the reverse
    CERTIFICATE_EXPIRED           of the server; or not valid yet
    CERTIFICATE_NAME              it is another server's, by its name
    CERTIFICATE_UNTRUSTED         nobody signed it whom this client believes
    CLIENT_CERTIFICATE_REFUSED    the server asks for one that it believes, and got none, or another
    NOT_GRPC                      something else has that port, as a page of metrics, and answers

Nothing of the caller's is sent: an HTTP/2 greeting at most, and never a token.
"""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError, UnknownCallerError

if TYPE_CHECKING:
    from teacher_logits.addresses import Address
    from teacher_logits.errors import TeacherLogitsError
    from teacher_logits_client.credentials import Tls

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The client's first words in HTTP/2, and empty settings."""
_FRAME_BYTES, _KIND_AT, _SETTINGS = 9, 3, 4
_EXPIRED, _NAME = {9, 10}, {62, 64}
"""OpenSSL's numbers (X509_V_ERR_...), of a time before or behind, and of a host or an IP."""
MAX_SECONDS = 2.0
_TLS_RECORDS = range(0x14, 0x18)
"""What a server of TLS begins with, where it answers a greeting that nothing encrypts."""
_LOOKS = 2
"""A server that is just stopping hangs up as well."""


def tls_finding(address: Address, tls: Tls | None, *, timeout: float) -> TeacherLogitsError | None:
    """Return what is wrong with TLS between this client and a server; None where nothing shows.

    Takes ``timeout`` seconds at most, and ``MAX_SECONDS``.
    """
    if address.is_unix:
        return None
    until = time.monotonic() + min(timeout, MAX_SECONDS)
    try:
        if tls is None:
            return _of_plaintext(address, until)
        return _of_tls(address, tls, until)
    except OSError:  # nobody is there, or nobody answers
        return None


def _of_plaintext(address: Address, until: float) -> TeacherLogitsError | None:
    answer = _plain_answer(address, until)
    if _is_settings(answer):
        return None
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _greet(address, until, context, "").close()
    except OSError as error:
        if not _is_alert(error):
            return _of_no_grpc(address, answer)
    return _config(
        "TLS_EXPECTED",
        address,
        f"the server at {address} speaks TLS, and this client came without: connect with "
        f"tls=Tls(ca=...), or to tls://{address} (--tls-ca)",
    )


def _of_tls(address: Address, tls: Tls, until: float) -> TeacherLogitsError | None:
    name = tls.server_name or address.host
    for _ in range(_LOOKS):
        try:
            with _greet(address, until, tls.context(), name) as connection:
                if _is_settings(_read(connection)):
                    return None
        except ssl.SSLCertVerificationError as error:
            return _of_certificate(address, name, error)
        except ssl.SSLError as error:
            if not _is_alert(error):
                return _of_no_tls(address, until)
    given = "this client shows none" if tls.cert is None else f"{tls.cert} is not one of them"
    return UnknownCallerError(
        f"the server at {address} lets in only who has a certificate that it believes "
        f"(--tls-client-ca), and {given}: connect with tls=Tls(cert=..., key=...) "
        "(--tls-cert, --tls-key)",
        facts={"address": str(address), "reason": "CLIENT_CERTIFICATE_REFUSED"},
    )


def _of_certificate(
    address: Address, name: str, error: ssl.SSLCertVerificationError
) -> ConfigError:
    said = error.verify_message.rstrip(".")
    if error.verify_code in _EXPIRED:
        why = "its time is not now: have the server's certificate renewed, or this clock set"
        return _config("CERTIFICATE_EXPIRED", address, _certificate(address, said, why))
    if error.verify_code in _NAME:
        why = (
            f"it is none of {name!r}: name the server as its certificate does (server_name=..., "
            "--tls-server-name)"
        )
        return _config("CERTIFICATE_NAME", address, _certificate(address, said, why))
    why = (
        "nobody signed it whom this client believes: give the server's authority as Tls(ca=...) "
        "(--tls-ca)"
    )
    return _config("CERTIFICATE_UNTRUSTED", address, _certificate(address, said, why))


def _of_no_tls(address: Address, until: float) -> ConfigError | None:
    answer = _plain_answer(address, until)
    if not _is_settings(answer):
        return _of_no_grpc(address, answer)
    return _config(
        "TLS_NOT_SPOKEN",
        address,
        f"the server at {address} speaks no TLS, and this client was told to: start it with "
        "--tls-cert and --tls-key, or leave tls out",
    )


def _of_no_grpc(address: Address, answer: bytes) -> ConfigError | None:
    """Return that no gRPC is spoken, by an ``answer`` to a greeting that nothing encrypts."""
    if not answer or answer[0] in _TLS_RECORDS:
        return None
    return _config(
        "NOT_GRPC",
        address,
        f"what answers at {address} speaks no gRPC: give the address that the server listens on "
        "(--listen); its page of metrics, for one, has another port",
    )


def _plain_answer(address: Address, until: float) -> bytes:
    """Return how an answer to a greeting begins that nothing encrypts; empty where none comes."""
    with _connected(address, until) as connection:
        _say(connection)
        return _read(connection)


def _greet(address: Address, until: float, context: ssl.SSLContext, name: str) -> ssl.SSLSocket:
    """Shake hands and say the first words; raises what the handshake does."""
    with _connected(address, until) as plain:
        connection = context.wrap_socket(plain, server_hostname=name or None)
    _say(connection)
    return connection


def _connected(address: Address, until: float) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=_left(until))


def _say(connection: socket.socket) -> None:
    with suppress(ConnectionError):  # what it said before it hung up is there to read
        connection.sendall(_GREETING)


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_FRAME_BYTES)
    except ConnectionError:
        return b""


def _is_settings(frame: bytes) -> bool:
    return len(frame) > _KIND_AT and frame[_KIND_AT] == _SETTINGS


def _is_alert(error: OSError) -> bool:
    """Whether the other side spoke TLS, and refused this side in it."""
    return isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _certificate(address: Address, said: str, why: str) -> str:
    return f"the certificate of the server at {address} is not taken ({said}): {why}"


def _config(reason: str, address: Address, message: str) -> ConfigError:
    return ConfigError(message, facts={"address": str(address), "reason": reason})
