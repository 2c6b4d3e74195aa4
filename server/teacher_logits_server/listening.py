"""Listening: where the broker's socket is, and what is said of addresses and folders."""

from __future__ import annotations

import logging
import os
import re
import stat
from typing import TYPE_CHECKING

from teacher_logits.addresses import Address, check_path
from teacher_logits_server.config import runtime_folder
from teacher_logits_server.sockets import LOCK_SUFFIX, SocketClaim, clear_if_dead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.sockets import Audience

BROKER_SUFFIX = ".broker"
_BY_PORT = re.compile(rf"(port-\d+{re.escape(BROKER_SUFFIX)}){re.escape(LOCK_SUFFIX)}")

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


def claim_broker(
    config: ServerConfig, addresses: Sequence[Address], audience: Audience
) -> SocketClaim:
    """Claim the broker's socket, and clear away those of servers by port that are gone.

    Warns where users that may map memory cannot come to the sockets.

    Raises:
        ConfigError: see ``broker_path`` and ``SocketClaim``.
    """
    path = broker_path(config, addresses)
    claim = SocketClaim(path, flag="--broker", audience=audience)
    folder = os.path.dirname(path)
    clear_dead_brokers(folder)
    if audience.group is None:
        _warn_of_shut_folders(config, [folder, *(os.path.dirname(a.path) for a in addresses)])
    return claim


def clear_dead_brokers(folder: str) -> None:
    """Remove what servers by port left that are gone: their ports may never come again."""
    try:
        names = os.listdir(folder)
    except OSError:  # it may be entered and not looked into
        return
    for name in names:
        found = _BY_PORT.fullmatch(name)
        if found is not None and clear_if_dead(os.path.join(folder, found[1])):
            _log.info("socket of a dead server removed", extra={"facts": {"path": found[1]}})


def _warn_of_shut_folders(config: ServerConfig, folders: Sequence[str]) -> None:
    shut = next((each for folder in folders if folder for each in _shut_to_others(folder)), None)
    if shut is None or not set(config.allow_uids) - {0, os.geteuid()}:
        return
    facts = {
        "folder": shut,
        "mode": f"{stat.S_IMODE(os.stat(shut).st_mode):04o}",
        "uids": ",".join(map(str, config.allow_uids)),
        "cure": "--socket-group, or a folder that you make yourself (mode 0711)",
    }
    _log.warning("users of --allow-uid cannot reach the socket", extra={"facts": facts})


def _shut_to_others(folder: str) -> list[str]:
    """Return the folders on the way, from the root on, that only their owner may enter."""
    way = [folder]
    while (above := os.path.dirname(way[0])) != way[0]:
        way.insert(0, above)
    return [each for each in way if not os.stat(each).st_mode & (stat.S_IXGRP | stat.S_IXOTH)]


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
