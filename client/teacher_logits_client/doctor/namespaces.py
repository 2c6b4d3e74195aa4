"""Which namespaces this process is in, and which of them it shares with a server.

Ids are inode numbers: processes of one number share that namespace. The kernel numbers the
machine's own PID, IPC, UTS, user and cgroup namespaces alike on every machine, so that a
container shows. They are hints for people; the handshake believes none of them.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits_client.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from teacher_logits.errors import Fact

NAMES = ("pid", "ipc", "net", "mnt", "user", "uts", "cgroup")
MACHINES_OWN = {
    "cgroup": 0xEFFFFFFB,
    "user": 0xEFFFFFFD,
    "uts": 0xEFFFFFFE,
    "ipc": 0xEFFFFFFF,
    "pid": 0xEFFFFFFC,
}
"""Linux, include/uapi/linux/nsfs.h: the numbers that the kernel gives its first ones."""
_WHAT_IT_MEANS = {
    "pid": "peers are proven by SO_PEERPIDFD alone (Linux 6.5), and cuda_ipc is refused",
    "ipc": "nothing: slabs are passed over a socket",
    "net": "a Unix socket is reached by its path, and a loopback address is another one",
    "mnt": "the socket's folder has to be mounted in both, under one path",
    "user": "uids are not the same numbers to both: see --allow-uid",
    "uts": "nothing: host names are hints",
    "cgroup": "nothing: each has its own memory limit",
}
_CONNECT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Server:
    """The process that listens at a Unix socket.

    ``pid`` is 0 where it is in a PID namespace that is not seen from here; ``namespaces`` has
    those that this process may look at.
    """

    pid: int
    uid: int
    namespaces: Mapping[str, int] = field(default_factory=dict)


def namespaces_of(process: int | str) -> dict[str, int]:
    """Return the namespaces of a process by name, those that may be looked at."""
    found = {}
    for name in NAMES:
        try:
            found[name] = os.stat(f"/proc/{process}/ns/{name}").st_ino
        except OSError:
            continue
    return found


def look_at_server(path: str) -> Server | None:
    """Ask the kernel who listens at a Unix socket; None where nobody does, or it does not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(path)
            pid, uid, _ = struct.unpack("iii", probe.getsockopt(socket.SOL_SOCKET, option, 12))
        except OSError:
            return None
    return Server(pid=pid, uid=uid, namespaces=namespaces_of(pid) if pid else {})


def container_finding(own: Mapping[str, int]) -> Finding:
    """Say which namespaces are the machine's own, and which a container's."""
    others = [name for name, number in MACHINES_OWN.items() if own.get(name, number) != number]
    facts: dict[str, Fact] = {name: name not in others for name in MACHINES_OWN if name in own}
    if not facts:
        message = "which namespaces these are cannot be seen"
    elif others:
        message = (
            f"in a container, or its like: {', '.join(sorted(others))} are not the machine's own "
            "namespaces"
        )
    else:
        message = "on the machine itself: its own PID, IPC, UTS, user and cgroup namespaces"
    return Finding(name="container", verdict=Verdict.OK, message=message, facts=facts)


def server_namespaces_finding(
    own: Mapping[str, int], server: Server, *, knows_peers: bool, has_gpu: bool
) -> Finding:
    """Say which namespaces a server shares with this process, and what each other one means.

    Args:
        knows_peers: whether the kernel has SO_PEERPIDFD, which proves a peer in any of them.
        has_gpu: whether payloads might have come in device memory.
    """
    shared = {
        name: number == own[name] for name, number in server.namespaces.items() if name in own
    }
    if server.pid == 0:
        shared["pid"] = False
    others = [name for name in NAMES if shared.get(name) is False]
    unseen = [name for name in NAMES if name not in shared]
    facts: dict[str, Fact] = {"server_pid": server.pid, "server_uid": server.uid, **shared}
    hides = f"; not to be seen from here: {', '.join(unseen)}" if unseen else ""
    if not others:
        message = f"the server shares {', '.join(shared) or 'none that can be seen'}{hides}"
        return Finding(name="server_namespaces", verdict=Verdict.OK, message=message, facts=facts)
    meant = "; ".join(f"{name}: {_WHAT_IT_MEANS[name]}" for name in others)
    is_dear = "pid" in others and (has_gpu or not knows_peers)
    return Finding(
        name="server_namespaces",
        verdict=Verdict.WARN if is_dear else Verdict.OK,
        message=f"the server has others than this process - {meant}{hides}",
        cure="let both share a PID namespace: docker --pid=container:NAME, or "
        "shareProcessNamespace: true in one pod"
        if is_dear
        else "",
        facts=facts,
    )
