"""Whether this process may go through the folders to a Unix socket, and connect to it.

The kernel is asked. Where it cannot be, that is decided by owner, group and mode, which explain its
answer to people as well; access control lists and capabilities may differ from them.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from teacher_logits_client.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from teacher_logits.errors import Fact


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder, or a socket, and whose it is; ``mode`` are its twelve bits of permission.

    ``allowed`` is the kernel's word; None where it was not asked.
    """

    path: str
    mode: int
    uid: int
    gid: int
    is_socket: bool = False
    allowed: bool | None = None

    @property
    def needed(self) -> int:
        """The bit of permission that is needed here: to search a folder, to write to a socket."""
        return os.W_OK if self.is_socket else os.X_OK


@dataclass(frozen=True, kw_only=True)
class Way:
    """The way to a socket: its folders from the root on, then itself, as far as they are seen.

    ``missing`` is the first that is not there; empty where all are, or a folder lets nobody look.
    """

    path: str
    entries: tuple[Entry, ...]
    missing: str
    uid: int
    gids: frozenset[int]


def look_at_way(path: str) -> Way:
    """Look at a socket and the folders on the way to it."""
    names = [name for name in path.split("/") if name]
    entries, missing = [], ""
    for depth in range(len(names) + 1):
        place = "/" + "/".join(names[:depth])
        try:
            found = os.stat(place)
        except FileNotFoundError:
            missing = place
            break
        except OSError:  # a folder before it lets nobody look, which its mode says
            break
        entry = Entry(
            path=place,
            mode=stat.S_IMODE(found.st_mode),
            uid=found.st_uid,
            gid=found.st_gid,
            is_socket=stat.S_ISSOCK(found.st_mode),
        )
        entries.append(replace(entry, allowed=_asked(entry)))
    gids = frozenset({os.getegid(), *os.getgroups()})
    return Way(path=path, entries=tuple(entries), missing=missing, uid=os.geteuid(), gids=gids)


def _asked(entry: Entry) -> bool | None:
    if os.access not in os.supports_effective_ids:
        return None
    return os.access(entry.path, entry.needed, effective_ids=True)


def may(entry: Entry, *, uid: int, gids: frozenset[int]) -> bool:
    """Whether a user may search a folder, or write to a socket, by kernel or mode."""
    bit = entry.needed
    if entry.allowed is not None:
        return entry.allowed
    if uid == 0:
        return True
    if uid == entry.uid:
        return bool(entry.mode >> 6 & bit)
    if entry.gid in gids:
        return bool(entry.mode >> 3 & bit)
    return bool(entry.mode & bit)


def way_finding(way: Way) -> Finding:
    """Judge whether this process comes to the socket and may connect to it."""
    for entry in way.entries:
        if not may(entry, uid=way.uid, gids=way.gids):
            return _denied(entry, way)
    facts: dict[str, Fact] = {"path": way.path, "uid": way.uid}
    if way.missing:
        return Finding(
            name="socket_folder",
            verdict=Verdict.WARN,
            message=f"{way.missing} is not there: no server listens, or its folder is not mounted "
            "here",
            cure="start the server; in a container, mount the socket's folder (the folder, and not "
            "the socket in it, which is another one after a restart)",
            facts={**facts, "missing": way.missing},
        )
    owners = [entry for entry in way.entries if not entry.is_socket]
    folder = _owned(owners[-1]) if owners else "its folder cannot be looked into"
    return Finding(
        name="socket_folder",
        verdict=Verdict.OK,
        message=f"{folder}: uid {way.uid} comes to the socket and may connect to it",
        facts=facts,
    )


def _denied(entry: Entry, way: Way) -> Finding:
    bit = "w" if entry.is_socket else "x"
    what = "connect to it" if entry.is_socket else "go through it"
    groups = ", ".join(map(str, sorted(way.gids)))
    return Finding(
        name="socket_folder",
        verdict=Verdict.FAIL,
        message=f"{_owned(entry)}: uid {way.uid} with the groups {groups} may not {what}",
        cure=f"run as uid {entry.uid}, or in group {entry.gid} where that has the right: "
        f"chmod g+{bit} {entry.path} (teacher-logits serve --socket-group makes both so)",
        facts={
            "path": way.path,
            "uid": way.uid,
            "denied_at": entry.path,
            "owner_uid": entry.uid,
            "owner_gid": entry.gid,
            "mode": f"{entry.mode:04o}",
        },
    )


def _owned(entry: Entry) -> str:
    return f"{entry.path} is uid {entry.uid}'s, group {entry.gid}, mode {entry.mode:04o}"
