"""The oracle: what must hold once a scenario is over, whatever happened in it.

No role process has a descriptor, a mapping, a memfd or a thread of Python's more than after a
quiet cycle; nothing of ours lies under a name; and the server owes no room that nobody has. What
is still on its way is waited for, no longer than ``PATIENCE_SECONDS``.

That no byte was wrong is seen by those who read (``content``), and that every call ended in
time by those who asked (``cast``).
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.processes.faults.cast import Cast, Role
from tests.processes.faults.workers import PATIENCE_SECONDS

SHM = Path("/dev/shm")
#: A server's threads that come when they are first wanted, up to a number, and stay; and those of
#: a library, which are Python's while they call it.
POOLED = ("asyncio", "Dummy")
#: What a server that runs has in its folder.
SOCKETS = ["s", "s.broker", "s.broker.lock", "s.lock"]
_OF_ONE = re.compile(r"(?<=heartbeat)-.*|[-_ ]?\d+")
"""What tells threads of one kind apart, in their names."""


@dataclass(frozen=True)
class Census:
    """What one process has.

    ``descriptors`` by what they lead to, ``slabs`` the inodes of memfds that are open or
    mapped with their sizes, ``mappings`` of them, ``threads`` of Python's by name.
    """

    descriptors: Mapping[str, int]
    slabs: Mapping[int, int]
    mappings: int
    threads: Mapping[str, int]

    def growth(self, baseline: "Census") -> list[str]:
        """Say what is there more of than in a baseline."""
        pairs = [
            *_pairs("descriptors of", self.descriptors, baseline.descriptors),
            ("memfds", len(self.slabs), len(baseline.slabs)),
            ("memfd bytes", sum(self.slabs.values()), sum(baseline.slabs.values())),
            ("mappings of memfds", self.mappings, baseline.mappings),
            *_pairs("threads", self.threads, baseline.threads),
        ]
        return [f"{what}: {now} and not {then}" for what, now, then in pairs if now > then]


def _pairs(
    what: str, now: Mapping[str, int], then: Mapping[str, int]
) -> Iterable[tuple[str, int, int]]:
    return [(f"{what} {name}", count, then.get(name, 0)) for name, count in now.items()]


def census_of(role: Role) -> Census:
    """Count what a role has, its forked children apart."""
    if role.kind != "server":
        role.do("collect")
    descriptors: Counter[str] = Counter()
    slabs: dict[int, int] = {}
    for entry in Path(f"/proc/{role.pid}/fd").iterdir():
        try:
            target, found = os.readlink(entry), entry.stat()
        except OSError:
            continue  # closed meanwhile
        if target.startswith("/memfd:"):
            slabs[found.st_ino] = found.st_size
        assert not _is_ours(target), f"{role} has {target} open"
        kind = "memfd" if target.startswith("/memfd:") else target.partition(":")[0]
        descriptors[kind if not kind.startswith("/") else "file"] += 1
    mappings = 0
    for line in Path(f"/proc/{role.pid}/maps").read_text().splitlines():
        assert not _is_ours("".join(line.split(maxsplit=5)[5:])), f"{role} has mapped {line}"
        if " /memfd:" in line:
            mappings += 1
            inode = int(line.split()[4])
            slabs.setdefault(inode, 0)
    names = Counter(_OF_ONE.sub("", name) for name in role.do("threads"))
    for each in POOLED:
        del names[each]
    return Census(descriptors=descriptors, slabs=slabs, mappings=mappings, threads=names)


def _is_ours(path: str) -> bool:
    """Say whether a file lies in /dev/shm, and is not of Ray's own store there.

    Nor a semaphore of ``multiprocessing``, which the process that runs the tests may have.
    """
    return path.startswith(f"{SHM}/") and not path.startswith((f"{SHM}/plasma", f"{SHM}/sem."))


@dataclass(frozen=True)
class Owed:
    """What the server may still have when all is over."""

    sessions: int = 0
    leases: int = 0
    used_bytes: int = 0


NOTHING = Owed()


class Oracle:
    """Holds a cast against what it was when it was quiet."""

    uncounted: frozenset[str] = frozenset()
    """Kinds of descriptors of which a library has as many as it likes."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._quiet: dict[int, Census] = {}
        self._names = _names_in_shm()

    def note_quiet(self, *roles: Role) -> None:
        """Take what roles have now as what they have when nothing is left of anything."""
        for role in roles:
            self._quiet[role.pid] = census_of(role)

    def note_warm(self, server: Role) -> None:
        """Have a server keep, when it is quiet, what it has made for its first clients."""
        before, after = self._quiet[server.pid], census_of(server)
        kept = {**before.descriptors, "memfd": after.descriptors["memfd"]}
        self._quiet[server.pid] = replace(after, descriptors=kept)

    def knows(self, role: Role) -> bool:
        """Whether a role has a baseline."""
        return role.pid in self._quiet

    def check_roles(self) -> None:
        """Hold all that live against their baselines."""
        self._await_right(self._roles_wrong)
        assert _names_in_shm() <= self._names, _names_in_shm() - self._names

    def check(self, owed: Owed = NOTHING) -> None:
        """Hold the server against what is owed too, and its folder."""
        # In this order: a look at the server is a connection of its, for a moment.
        self._await_right(lambda: self._roles_wrong() or self.server_wrong(owed))
        assert _names_in_shm() <= self._names, _names_in_shm() - self._names
        found = sorted(path.name for path in self._cast.place.run.iterdir())
        assert found == SOCKETS, found

    def _await_right(self, look: Callable[[], list[str]]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while wrong := look():
            if time.monotonic() > until:
                raise AssertionError("; ".join(wrong) + f"\n{self._cast.place.said()}")

    def _roles_wrong(self) -> list[str]:
        return [
            f"{name} ({role}): {growth}"
            for name, role in self._cast.living().items()
            if role.pid in self._quiet
            for growth in census_of(role).growth(self._quiet[role.pid])
            if not any(f"descriptors of {kind}:" in growth for kind in self.uncounted)
        ]

    def server_wrong(self, owed: Owed) -> list[str]:
        """Say in what the server differs from what is owed."""
        view = self._cast.inspect()
        pool, registered, queue = view.pool, view.registered, view.queue
        counts = [
            ("leases", len(view.leases), owed.leases),
            ("bytes used", pool.used_bytes, owed.used_bytes),
            ("bytes in quarantine", pool.quarantined_bytes, 0),
            ("sessions", len(view.sessions), owed.sessions),
            ("steps", len(view.steps), 0),
            ("registered payloads", registered.payload_count, 0),
            ("registered slabs", registered.slab_count, 0),
            ("teachers", len(view.teachers), 1),
            ("requests", queue.waiting_requests + queue.running_requests, 0),
        ]
        wrong = [f"server: {now} {what}, not {then}" for what, now, then in counts if now != then]
        return [*wrong, *(str(step) for step in view.steps)]


def _names_in_shm() -> set[str]:
    """Return the names in /dev/shm that could be ours; others share the folder."""
    return {name for name in os.listdir(SHM) if "teacher" in name or name.startswith("tl")}
