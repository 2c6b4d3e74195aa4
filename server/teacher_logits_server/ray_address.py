"""The address of a Ray cluster: tried before Ray tries it, and refused in words that name the flag.

Ray itself would try for minutes where nobody listens, and then end the process.
"""

from __future__ import annotations

import socket

from teacher_logits.errors import ConfigError

FLAG = "--ray-address"
AUTO = "auto"
CONNECT_SECONDS = 5.0
_CLIENT_SCHEME = "ray://"
_TOKENS = (
    "where one runs there that was started with a token, set RAY_AUTH_MODE=token here too, and "
    "RAY_AUTH_MODE=disabled where it was started without"
)
"""What else may keep a driver out: Ray says no more than that it could not connect."""


def check_listening(address: str, *, found: str = "") -> None:
    """Refuse an address at which nobody listens. ``found`` is where ``auto`` is, if that is known.

    Raises:
        ConfigError: naming the flag, and what to start.
    """
    if address.startswith(_CLIENT_SCHEME):
        raise refused(address, "is Ray Client's: give host:port, with a node on this machine")
    place = found or address
    host, _, port = place.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise refused(
            address,
            f"nobody listens at {place} ({said}): start a cluster with a node on this machine "
            f"(`ray start --head`), or give the address of the one there is{_or_auto(address)}",
        ) from None


def no_cluster(address: str, said: str) -> ConfigError:
    """Return the refusal of an address at which somebody listens, and no cluster was joined."""
    return refused(
        address,
        f"no Ray cluster could be joined there ({said}): start one with a node on this machine "
        "(`ray start --head`, or `ray start --address=...`), or give the address of another as "
        f"host:port{_or_auto(address)}; {_TOKENS}",
    )


def _or_auto(address: str) -> str:
    """Return the other way to say where a cluster is, unless it was taken."""
    return "" if address == AUTO else f", or {AUTO} for one that runs here"


def refused(address: str, why: str) -> ConfigError:
    """Return the refusal of an address."""
    return ConfigError(f"{FLAG} {address}: {why}", facts={"flag": FLAG, "value": address})
