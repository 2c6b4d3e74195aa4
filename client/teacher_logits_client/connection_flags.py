"""The flags by which every command says which server it means, and how to come there.

``add_connection`` adds them to a command's parser, and ``connection_of`` reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError
from teacher_logits_client.config import DEFAULT_TIMEOUT_SECONDS, Connection, find_connection
from teacher_logits_client.credentials import Tls

if TYPE_CHECKING:
    import argparse

ADDRESS_HELP = "where the server is: unix:/path, host:port or tls://host:port"

_FILES = (
    ("--tls-ca", "who may have signed the certificate of a server over TCP (PEM)"),
    ("--tls-cert", "certificate of this command, for a server that asks for one (PEM)"),
    ("--tls-key", "private key of --tls-cert (PEM)"),
)


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a connection, ``--timeout`` among them."""
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help=f"how long the server may take to answer (default: {DEFAULT_TIMEOUT_SECONDS:g})",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file of the token to show, where the server asks for one "
        "(default: that of TEACHER_LOGITS_TOKEN_FILE)",
    )
    for flag, text in _FILES:
        parser.add_argument(flag, metavar="FILE", help=text)
    parser.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="name in the server's certificate, where it is not the address's",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow an address on another host without TLS; nothing is encrypted",
    )


def tls_of(flags: argparse.Namespace) -> Tls | None:
    """Return what the flags say of TLS; None where they say nothing.

    Raises:
        ConfigError: a certificate was given without its key, or the reverse.
    """
    if (flags.tls_cert is None) != (flags.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together: give both")
    said = (flags.tls_ca, flags.tls_cert, flags.tls_server_name)
    if all(each is None for each in said):
        return None
    return Tls(
        ca=flags.tls_ca, cert=flags.tls_cert, key=flags.tls_key, server_name=flags.tls_server_name
    )


def connection_of(flags: argparse.Namespace) -> Connection:
    """Return the server that ``flags.address`` names, and how to come there.

    Raises:
        ConfigError: the address is none, or needs other flags; see ``config.find_connection``.
    """
    return find_connection(
        flags.address, insecure=flags.insecure, tls=tls_of(flags), token_file=flags.token_file
    )
