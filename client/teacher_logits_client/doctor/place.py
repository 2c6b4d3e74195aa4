"""Where this process runs, as the server's broker and other processes see it.

Ids of namespaces are inode numbers: two processes that print the same number share that
namespace. They are hints for people; the handshake believes none of them.
"""

from __future__ import annotations

import os
import resource
import socket
from typing import TYPE_CHECKING

from teacher_logits.addresses import MAX_PATH_BYTES
from teacher_logits_client.doctor.findings import Finding, Verdict
from teacher_logits_client.doctor.namespaces import container_finding, namespaces_of

if TYPE_CHECKING:
    from teacher_logits.errors import Fact
    from teacher_logits_client.doctor.config import Surroundings

_ENOUGH_FILES = 1024
_CONNECT_SECONDS = 1.0


def place_findings(surroundings: Surroundings) -> list[Finding]:
    """Look at user, namespaces, limits and the default socket."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        user_finding(),
        container_finding(namespaces_of("self")),
        open_files_finding(files),
        socket_finding(surroundings.socket_path),
        runtime_folder_finding(surroundings),
    ]


def user_finding() -> Finding:
    """Say who this process is."""
    namespaces = namespaces_of("self")
    shown = ", ".join(f"{name} {inode}" for name, inode in namespaces.items()) or "unknown"
    return Finding(
        name="identity",
        verdict=Verdict.OK,
        message=f"uid {os.geteuid()}, gid {os.getegid()}, pid {os.getpid()}, host "
        f"{socket.gethostname()}; namespaces: {shown}",
        facts={"uid": os.geteuid(), "gid": os.getegid(), "pid": os.getpid(), **namespaces},
    )


def open_files_finding(limit: int) -> Finding:
    """Judge how many descriptors this process may have open."""
    unlimited = limit == resource.RLIM_INFINITY
    is_low = not unlimited and limit < _ENOUGH_FILES
    return Finding(
        name="open_files",
        verdict=Verdict.WARN if is_low else Verdict.OK,
        message=f"at most {'unlimited' if unlimited else limit} open files (ulimit -n)",
        cure=f"raise it to {_ENOUGH_FILES} or more: a server takes three descriptors a student"
        if is_low
        else "",
        facts={"limit": -1 if unlimited else limit},
    )


def socket_finding(path: str) -> Finding:
    """Judge the socket at which a server of this user listens when told nothing."""
    length = len(os.fsencode(path))
    facts: dict[str, Fact] = {"path": path, "length_bytes": length, "limit_bytes": MAX_PATH_BYTES}
    if length > MAX_PATH_BYTES:
        return Finding(
            name="default_socket",
            verdict=Verdict.FAIL,
            message=f"{path} has {length} bytes, and the kernel takes at most {MAX_PATH_BYTES}",
            cure="set XDG_RUNTIME_DIR or TMPDIR to a shorter folder, or serve with --listen "
            "unix:/short/path",
            facts=facts,
        )
    return Finding(
        name="default_socket",
        verdict=Verdict.OK,
        message=f"unix:{path} ({length} of at most {MAX_PATH_BYTES} bytes): {_who_listens(path)}",
        facts=facts,
    )


def runtime_folder_finding(surroundings: Surroundings) -> Finding:
    """Say whether the user has a runtime folder."""
    if surroundings.runtime_folder:
        message = f"XDG_RUNTIME_DIR is {surroundings.runtime_folder}"
    else:
        message = (
            "XDG_RUNTIME_DIR names no folder (usual in containers); the default socket is elsewhere"
        )
    return Finding(
        name="runtime_folder",
        verdict=Verdict.OK,
        message=message,
        facts={"path": surroundings.runtime_folder},
    )


def _who_listens(path: str) -> str:
    """Say whether somebody answers at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return "no server is there"
        except ConnectionRefusedError:
            return "left behind by a server that is gone"
        except OSError as error:
            return f"cannot be connected to ({error.strerror or error})"
    return "a server listens there"
