"""Certificates: what the server's TCP addresses show, and whose they ask for.

The files are looked at when somebody connects. A pair that does not belong together, as while one
of two files is replaced, is not taken: the old one goes on, and the log says why. Nor is a key that
other users can read. What is taken is said too, with when it ends; the time of day decides of a
warning alone.
"""

from __future__ import annotations

import logging
import math
import ssl
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING

import grpc

from teacher_logits.errors import ConfigError, TeacherLogitsError
from teacher_logits.reloading import Reloading
from teacher_logits.secret_files import read_file_bytes, read_secret_bytes
from teacher_logits_server.certificate_dates import end_of
from teacher_logits_server.metrics.instruments import Instruments

if TYPE_CHECKING:
    from teacher_logits_server.config import ServerConfig

_SOON_SECONDS = 86400.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Certificates:
    """What the files hold. ``ends`` is of the server's own, in seconds since 1970."""

    ends: float
    grpc: grpc.ServerCertificateConfiguration


def server_credentials(
    config: ServerConfig, instruments: Instruments | None = None
) -> grpc.ServerCredentials | None:
    """Return the credentials for TCP addresses; None where they go without TLS.

    When the certificate ends is among the metrics; a scrape looks at the files as well.

    Raises:
        ConfigError: a file cannot be read, or holds no certificate or key that fits.
    """
    if not config.tls_cert:
        return None
    files = [each for each in (config.tls_cert, config.tls_key, config.tls_client_ca) if each]
    made = Reloading(files, partial(_read, config), on_failure=_tell, on_change=_taken)
    _warn(made.current())
    (instruments or Instruments()).show_end(lambda: made.current().ends)
    return grpc.dynamic_ssl_server_credentials(
        made.current().grpc,
        lambda: made.current().grpc,
        require_client_authentication=bool(config.tls_client_ca),
    )


def _read(config: ServerConfig) -> _Certificates:
    chain = read_file_bytes(config.tls_cert, what="--tls-cert")
    key = read_secret_bytes(config.tls_key, what="--tls-key")
    authorities = None
    try:
        # gRPC takes anything here, and then refuses whoever connects.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:
        raise _refused(
            f"--tls-cert {config.tls_cert}, --tls-key {config.tls_key}: no certificate and its "
            f"key in PEM, without a password: {_said(error)}",
            "--tls-cert",
        ) from error
    if config.tls_client_ca:
        authorities = read_file_bytes(config.tls_client_ca, what="--tls-client-ca")
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (OSError, ValueError) as error:
            raise _refused(
                f"--tls-client-ca {config.tls_client_ca}: no certificates in PEM: {_said(error)}",
                "--tls-client-ca",
            ) from error
    made = grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)
    return _Certificates(ends=end_of(chain), grpc=made)


def _no_password() -> str:
    raise ValueError("the key has a password")


def _said(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _refused(message: str, flag: str) -> ConfigError:
    return ConfigError(message, facts={"flag": flag})


def _taken(certificates: _Certificates) -> None:
    _log.info("new certificates taken", extra={"facts": {"ends": _date(certificates.ends)}})
    _warn(certificates)


def _warn(certificates: _Certificates) -> None:
    left = certificates.ends - time.time()
    if left < _SOON_SECONDS:
        what = "certificate has ended" if left < 0 else "certificate ends within a day"
        _log.warning(what, extra={"facts": {"ends": _date(certificates.ends)}})


def _date(seconds: float) -> str:
    if math.isnan(seconds):
        return "unknown"
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _tell(error: TeacherLogitsError) -> None:
    facts = {"error": error.message}
    _log.error("new certificates not taken, the old ones go on", extra={"facts": facts})
