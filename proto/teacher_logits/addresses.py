"""Addresses of servers, as they are written where one listens and where one connects.

    unix:/run/teacher-logits/teacher.sock      a Unix socket, by absolute path; or the path alone
    127.0.0.1:5555   [::1]:5555   host:0       TCP; to a server that listens, port 0 is any

Refuses what is none, and a socket path that the kernel could not take (over 107 bytes). Whether an
address may be listened at, or connected to, is each side's to say.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError
from teacher_logits.keys import is_text

if TYPE_CHECKING:
    from teacher_logits.errors import Fact

UNIX = "unix:"
MAX_PATH_BYTES = 107
"""``sun_path`` has 108 bytes, and a path ends with a zero byte."""
_MAX_PORT = 65535
_PORT_CHARS = 100
"""Zeros in front are taken."""


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

    @property
    def target(self) -> str:
        """The address as a gRPC channel takes it."""
        return str(self) if self.is_unix else f"dns:///{self}"

    def __str__(self) -> str:
        if self.is_unix:
            return UNIX + self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str, *, what: str, or_else: str = "", takes_unix: bool = True) -> Address:
    """Read one address; ``what`` names it in messages: a flag, or an argument.

    For the message: ``or_else`` is a form that the caller takes besides, and ``takes_unix`` says
    whether it takes Unix sockets.

    Raises:
        ConfigError: it is none.
    """
    if text.startswith((UNIX, "/")):
        path = text.removeprefix(UNIX)
        # gRPC also writes unix:///path.
        return Address(path=check_path(path[2:] if path.startswith("///") else path, what=what))
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_host = bool(bare) and (":" in bare) == host.startswith("[") and "/" not in bare
    if not colon or not is_host or not port.isdecimal() or not is_host_name(bare):
        unix = ["unix:/absolute/path"] if takes_unix else []
        forms = [*unix, "host:port", "[v6]:port", *([or_else] if or_else else [])]
        raise ConfigError(
            f"{what} {text!r} is no address: give {', '.join(forms[:-1])} or {forms[-1]}",
            facts={**_named(what), "value": text},
        )
    # Python reads no number of thousands of digits.
    number = int(port) if len(port) <= _PORT_CHARS else _MAX_PORT + 1
    if number > _MAX_PORT:
        raise ConfigError(
            f"{what} {text!r} has port {port}; ports go to {_MAX_PORT}",
            facts={**_named(what), "value": text, "port": port},
        )
    return Address(host=bare, port=number)


def is_host_name(text: str) -> bool:
    """Whether a resolver can be asked for it: a name of parts of 1 to 63 bytes, or an IP."""
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


def check_path(path: str, *, what: str) -> str:
    """Return the path of a Unix socket if the kernel can take it.

    Raises:
        ConfigError: it is relative, longer than 107 bytes, or not in UTF-8, as gRPC takes it.
    """
    if not os.path.isabs(path) or "\0" in path or path.endswith("/"):
        raise ConfigError(
            f"{what} {path!r} is not the absolute path of a socket",
            facts={**_named(what), "path": path},
        )
    if not is_text(path):
        raise ConfigError(
            f"{what}: the socket path {path!r} is not in UTF-8, as gRPC takes it",
            facts={**_named(what), "path": path},
        )
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"{what}: the socket path {path!r} has {length} bytes, and the kernel takes at most "
            f"{MAX_PATH_BYTES}: have the server listen in a folder with a shorter name",
            facts={**_named(what), "length_bytes": length, "limit_bytes": MAX_PATH_BYTES},
        )
    return path


def _named(what: str) -> dict[str, Fact]:
    return {"flag" if what.startswith("--") else "argument": what}
