"""What the doctor looks up in the environment: here alone, and only when it is asked."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

SOCKET_NAME = "teacher.sock"
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The environment, as far as it matters here.

    ``runtime_folder`` is that of the user (XDG_RUNTIME_DIR), empty where there is none;
    ``proxies`` are names of variables, without their values, which may hold passwords.
    """

    runtime_folder: str
    temporary_folder: str
    proxies: tuple[str, ...]

    @property
    def socket_path(self) -> str:
        """Where a server of this user listens when told nothing."""
        if self.runtime_folder:
            folder = os.path.join(self.runtime_folder, "teacher-logits")
        elif os.access("/run/teacher-logits", os.W_OK) or os.access("/run", os.W_OK):
            folder = "/run/teacher-logits"
        else:
            folder = os.path.join(self.temporary_folder, f"teacher-logits-{os.geteuid()}")
        return os.path.join(folder, SOCKET_NAME)


def read_surroundings() -> Surroundings:
    """Look at the environment of this process."""
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR", "")
    is_usable = os.path.isabs(runtime_folder) and os.path.isdir(runtime_folder)
    return Surroundings(
        runtime_folder=runtime_folder if is_usable else "",
        temporary_folder=tempfile.gettempdir(),
        proxies=tuple(
            name for lower in _PROXIES for name in (lower, lower.upper()) if os.environ.get(name)
        ),
    )
