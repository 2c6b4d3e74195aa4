"""Whether this user is kept out of a Unix socket: gRPC says that nobody answers, as ever.

No waiting helps there, so it is told as something to be changed, with what keeps out: the socket,
or a folder on the way to it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from teacher_logits.addresses import Address
    from teacher_logits.errors import Fact

_AGAIN_SECONDS = 0.25
"""A server that is just starting makes its socket first, and opens it to others then."""


def shut_finding(address: Address, *, timeout: float) -> ConfigError | None:
    """Return what keeps this user from a socket; None where nothing does, or it is none.

    It is looked at twice, ``timeout`` seconds apart at most.
    """
    if not address.is_unix or not is_kept_out(address.path):
        return None
    time.sleep(min(_AGAIN_SECONDS, timeout))
    if not is_kept_out(address.path):
        return None
    uid = os.geteuid()
    facts: dict[str, Fact] = {"address": str(address), "uid": uid, "reason": "SOCKET_SHUT"}
    where, what = address.path, "connect to"
    if (found := _shut_place(address.path)) is not None:
        where, mode, owner = found
        facts |= {"path": where, "mode": f"{mode:04o}", "owner": owner}
        what = "connect to" if where == address.path else "enter"
        where = f"{where} (mode {mode:04o}, user {owner}'s)"
    return ConfigError(
        f"user {uid} may not {what} {where}, so that {address} cannot be reached: have the server "
        "started with --socket-group and a group of this user's, or run as its user",
        facts=facts,
    )


def is_kept_out(path: str) -> bool:
    """Whether the kernel lets this user not connect to a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) in (errno.EACCES, errno.EPERM)


def _shut_place(path: str) -> tuple[str, int, int] | None:
    """Return the first place on the way that keeps this user out, its mode and its owner."""
    places = [path]
    while (above := os.path.dirname(places[0])) not in ("", places[0]):
        places.insert(0, above)
    try:
        for place in places:
            found = os.stat(place)
            needed = os.X_OK if stat.S_ISDIR(found.st_mode) else os.W_OK
            if not os.access(place, needed, effective_ids=True):
                return place, stat.S_IMODE(found.st_mode), found.st_uid
    except OSError:
        pass
    return None
