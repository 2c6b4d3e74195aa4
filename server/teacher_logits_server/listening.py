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


def log_addresses(addresses: Sequence[Address]) -> None:
    """Say where the server listens, and warn where other hosts reach it."""
    for address in addresses:
        _log.info("listening", extra={"facts": {"address": str(address)}})
        if not address.is_loopback:
            _log.warning("reachable by other hosts", extra={"facts": {"address": str(address)}})
