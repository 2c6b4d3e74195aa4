"""Where a server listens: addresses as they are written, and the rules about them.

    unix:/run/teacher-logits/teacher.sock      a Unix socket, by absolute path; or the path alone
    127.0.0.1:5555   [::1]:5555   host:0       TCP; port 0 lets the system choose

Refuses a socket path that the kernel could not take (over 107 bytes), and a TCP address
that other hosts reach unless that was asked for: the service has no TLS yet.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from teacher_logits.errors import ConfigError

UNIX = "unix:"
MAX_PATH_BYTES = 107
"""``sun_path`` has 108 bytes, and a path ends with a zero byte."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """One address; ``path`` for a Unix socket, else ``host`` and ``port``."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket."""
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """Whether only this host reaches it."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.is_unix:
            return UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, flag: str) -> Address:
    """Read one address.

    Raises:
        ConfigError: it is none, naming the flag.
    """
    if text.startswith((UNIX, "/")):
        return Address(path=check_path(text.removeprefix(UNIX), flag=flag))
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isdecimal() or (":" in bare) != host.startswith("["):
        raise ConfigError(
            f"{flag} {text!r} is no address: give unix:/absolute/path, host:port or [v6]:port",
            facts={"flag": flag, "value": text},
        )
    if int(port) > 65535:
        raise ConfigError(
            f"{flag} {text!r} has port {port}; ports go to 65535",
            facts={"flag": flag, "port": int(port)},
        )
    return Address(host=bare, port=int(port))


def check_path(path: str, *, flag: str) -> str:
    """Return the path of a Unix socket if the kernel can take it.

    Raises:
        ConfigError: it is relative, or longer than 107 bytes.
    """
    if not os.path.isabs(path) or "\0" in path or path.endswith("/"):
        raise ConfigError(
            f"{flag}: {path!r} is not the absolute path of a socket",
            facts={"flag": flag, "path": path},
        )
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"{flag}: the socket path {path!r} has {length} bytes, and the kernel takes at most "
            f"{MAX_PATH_BYTES}: choose a shorter folder",
            facts={"flag": flag, "length_bytes": length, "limit_bytes": MAX_PATH_BYTES},
        )
    return path


def check_reach(address: Address, *, insecure: bool) -> None:
    """Refuse an address that other hosts reach unless that was asked for.

    Raises:
        ConfigError: naming ``--insecure``.
    """
    if insecure or address.is_loopback:
        return
    raise ConfigError(
        f"--listen {address} can be reached from other hosts, and everyone who reaches it may "
        "use the teacher, unencrypted: listen on 127.0.0.1 or a Unix socket, or say --insecure "
        "if the network is yours alone",
        facts={"flag": "--listen", "value": str(address)},
    )
