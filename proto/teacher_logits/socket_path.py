"""Where the sockets of one user's servers lie when nobody says where.

Server and client come to the same answer from the same environment. It is an argument:
``config`` modules alone read that of the process.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SOCKET_NAME = "teacher.sock"
_FOLDER_NAME = "teacher-logits"
_SYSTEM_FOLDER = f"/run/{_FOLDER_NAME}"


def default_socket_path(environment: Mapping[str, str]) -> str:
    """Return the Unix socket that a server listens on when told nothing."""
    return os.path.join(socket_folder(environment), SOCKET_NAME)


def socket_folder(environment: Mapping[str, str]) -> str:
    """Return the folder that holds this user's sockets. It need not exist yet.

    In the user's runtime folder; without one, in /run if that may be written; else a folder
    of this user's own below the system's temporary folder.
    """
    user_folder = user_runtime_folder(environment)
    if user_folder:
        return os.path.join(user_folder, _FOLDER_NAME)
    if os.access(_SYSTEM_FOLDER, os.W_OK) or os.access("/run", os.W_OK):
        return _SYSTEM_FOLDER
    return os.path.join(tempfile.gettempdir(), f"{_FOLDER_NAME}-{os.geteuid()}")


def user_runtime_folder(environment: Mapping[str, str]) -> str:
    """Return XDG_RUNTIME_DIR; empty where it names no folder that is there."""
    folder = environment.get("XDG_RUNTIME_DIR", "")
    return folder if os.path.isabs(folder) and os.path.isdir(folder) else ""
