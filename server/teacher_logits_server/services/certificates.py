"""Certificates: what the server's TCP addresses show, and whose they ask for.

The files are looked at when somebody connects. A pair that does not belong together, as while one
of two files is replaced, is not taken: the old one goes on, and the log says why. Nor is a key that
other users can read.
"""

from __future__ import annotations

import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING

import grpc

from teacher_logits.errors import ConfigError, TeacherLogitsError
from teacher_logits.reloading import Reloading
from teacher_logits.secret_files import read_secret_bytes

if TYPE_CHECKING:
    from teacher_logits_server.config import ServerConfig

_log = logging.getLogger(__name__)


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Return the credentials for TCP addresses; None where they go without TLS.

    Raises:
        ConfigError: a file cannot be read, or holds no certificate or key that fits.
    """
    if not config.tls_cert:
        return None
    files = [each for each in (config.tls_cert, config.tls_key, config.tls_client_ca) if each]
    made = Reloading(files, partial(_read, config), on_failure=_tell)
    return grpc.dynamic_ssl_server_credentials(
        made.current(), made.current, require_client_authentication=bool(config.tls_client_ca)
    )


def _read(config: ServerConfig) -> grpc.ServerCertificateConfiguration:
    chain = _bytes("--tls-cert", config.tls_cert)
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
        authorities = _bytes("--tls-client-ca", config.tls_client_ca)
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (OSError, ValueError) as error:
            raise _refused(
                f"--tls-client-ca {config.tls_client_ca}: no certificates in PEM: {_said(error)}",
                "--tls-client-ca",
            ) from error
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authorities)


def _bytes(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise _refused(f"{flag} {path} cannot be read: {error.strerror or error}", flag) from error


def _no_password() -> str:
    raise ValueError("the key has a password")


def _said(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _refused(message: str, flag: str) -> ConfigError:
    return ConfigError(message, facts={"flag": flag})


def _tell(error: TeacherLogitsError) -> None:
    facts = {"error": error.message}
    _log.error("new certificates not taken, the old ones go on", extra={"facts": facts})
