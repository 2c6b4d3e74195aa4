"""Listening: where the broker's socket is, and what is said of addresses."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from teacher_logits.addresses import Address, check_path
from teacher_logits_server.config import runtime_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_server.config import ServerConfig

BROKER_SUFFIX = ".broker"

_log = logging.getLogger(__name__)


def broker_path(config: ServerConfig, addresses: Sequence[Address]) -> str:
    """Return where the broker listens: as told, or beside the first Unix socket, or by port.

    Raises:
        ConfigError: the path is too long, with the flag that gives another.
    """
    if config.broker:
        return config.broker
    first = next((address for address in addresses if address.is_unix), None)
    if first is not None:
        path = first.path + BROKER_SUFFIX
    else:
        path = os.path.join(runtime_folder(), f"port-{addresses[0].port}{BROKER_SUFFIX}")
    return check_path(path, what="--broker")


def log_addresses(addresses: Sequence[Address], config: ServerConfig) -> None:
    """Say where the server listens, and warn of those that let in whoever reaches them."""
    asks = bool(config.token_file or config.tls_client_ca)
    for address in addresses:
        is_tls = bool(config.tls_cert) and not address.is_unix
        facts = {"address": str(address), "tls": is_tls}
        _log.info("listening", extra={"facts": facts})
        if not address.is_unix and not (is_tls and asks):
            facts = {
                **facts,
                "asks_who": asks,
                "reached_by": "this machine" if address.is_loopback else "other hosts",
                "flags": "--token-file --tls-client-ca" if is_tls else "--tls-cert --tls-key",
            }
            what = "whoever reaches this may use the teacher" if is_tls else "nothing is encrypted"
            _log.warning(what, extra={"facts": facts})
