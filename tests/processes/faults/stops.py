"""Moments: named points of the product at which a role process stops until it is told to go on.

A point is before or after a function of ours, or behind its second chunk where it yields
some. The function is wrapped in the role's own process, when the point is armed; so a moment
is hit by where the process is, never by when. What a point names must be there: a function
that was renamed fails the scenarios that need it.
"""

import enum
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PATIENCE_SECONDS = 60
_CLIENT, _SERVER = "teacher_logits_client", "teacher_logits_server"


class Side(enum.Enum):
    """Where a point lies."""

    BEFORE = "before"
    AFTER = "after"
    CHUNK = "chunk"


@dataclass(frozen=True)
class Point:
    """A place of the product: ``module:Class.function``, and on which side of it."""

    place: str
    side: Side

    def owner(self) -> tuple[Any, str]:
        """Return what has the function, and its name there."""
        module, _, path = self.place.partition(":")
        *classes, name = path.split(".")
        found: Any = importlib.import_module(module)
        for each in classes:
            found = getattr(found, each)
        getattr(found, name)
        return found, name


def _around(name: str, place: str) -> dict[str, Point]:
    return {
        f"before {name}": Point(place, Side.BEFORE),
        f"after {name}": Point(place, Side.AFTER),
    }


_LEASES = {
    **_around("open", f"{_CLIENT}.sessions.reader:Reader.open_bytes"),
    "stream chunk": Point(f"{_CLIENT}.calls:Calls.read_payload", Side.CHUNK),
    **_around("close", f"{_CLIENT}.payloads:LeasedPayload.let_go"),
    **_around("release", f"{_CLIENT}.sessions.reader:Reader._give_back"),
}
#: Points of a student that scores, and of one that acquires steps. "read" is the role's own.
SCORES = {"after ask": Point(f"{_CLIENT}.calls:Calls.score", Side.AFTER), **_LEASES}
STEPS = {"before acquire": Point(f"{_CLIENT}.steps:Steps.acquire", Side.BEFORE), **_LEASES}
#: Of one that opens a step which is announced and not sealed.
AHEAD = _around("look ahead", f"{_CLIENT}.steps.opened_ahead:OpenedAhead.open_announced")

#: Of a student that reads objects of a Ray cluster's store: put, and the reference handed out.
OBJECTS = {
    **_around("put", f"{_CLIENT}.openers.ray_object:RayObjectOpener._ask"),
    "before take": Point(f"{_CLIENT}.openers.ray_cluster:_ask", Side.BEFORE),
    "after take": Point(f"{_CLIENT}.openers.ray_cluster:_taken", Side.AFTER),
    "before copy": Point(f"{_CLIENT}.openers.ray_object:copy", Side.BEFORE),
}
_OPENED = {name: point for name, point in _LEASES.items() if name != "stream chunk"}
#: Of one that reads the memory of a server in its own process, by its table of slabs.
FOUND = {"after find": Point(f"{_CLIENT}.openers.local:LocalPayload.__init__", Side.BEFORE)}
OBJECT_SCORES = {"after ask": SCORES["after ask"], **_OPENED, **OBJECTS}
OBJECT_STEPS = {"before acquire": STEPS["before acquire"], **_OPENED, **OBJECTS}
LOCAL_SCORES = {"after ask": SCORES["after ask"], **_OPENED, **FOUND}
#: Steps are opened by a thread of the session's own.
LOCAL_STEPS = {
    "before acquire": STEPS["before acquire"],
    **{name: point for name, point in _OPENED.items() if not name.endswith("open")},
}
STUDENT = SCORES | STEPS | AHEAD | OBJECTS | FOUND

#: Points of a publisher. "write" is the role's own.
PUBLISHER = {
    **_around("reserve", f"{_CLIENT}.publishing.publisher:Publisher.reserve"),
    "before put_slab": Point(f"{_CLIENT}.line:Line.put_slab", Side.BEFORE),
    "upload chunk": Point(f"{_CLIENT}.publishing.uploads:_chunks", Side.CHUNK),
    **_around("seal", f"{_CLIENT}.drafts:Draft.seal"),
}

#: Sealed by its slot, and the server has not heard of it. "write" is announced, and not sealed.
SEALED = {"before it says so": Point(f"{_CLIENT}.line:Line.seal", Side.BEFORE)}
ANNOUNCING = _around("announce", f"{_SERVER}.ledger:Ledger.announce_payload")

_LENDS = {
    "before get_slab": Point(f"{_SERVER}.services.line:LineDesk._pass_slab", Side.BEFORE),
    "stream chunk": Point(f"{_SERVER}.exporters.stream:StreamExporter._chunks", Side.CHUNK),
    **_around("release", f"{_SERVER}.ledger:Ledger.release"),
}
#: Points of the server: for scored payloads, and for registered ones.
SCORING = {
    "engine chunk": Point("tests.transport_suite.dense_teacher:DenseTeacher.logits", Side.CHUNK),
    **_around("publish", f"{_SERVER}.ledger:Ledger.publish"),
    **_LENDS,
}
REGISTRY = {
    "before put_slab": Point(f"{_SERVER}.ledger:Ledger.add_foreign_slab", Side.BEFORE),
    **_around("reserve", f"{_SERVER}.ledger:Ledger.reserve_payload"),
    "upload chunk": Point(f"{_SERVER}.services.uploads:Upload._copy", Side.AFTER),
    **_around("seal", f"{_SERVER}.ledger:Ledger.seal_payload"),
    **_around("grant", f"{_SERVER}.ledger:Ledger._grant"),
    **_LENDS,
}

#: Of the server: for scored payloads that stay in replicas' stores, and for registered ones, which
#: its Ray process puts into its own node's.
_TICKETS = {
    **_around("ticket", f"{_SERVER}.exporters.ray_object:RayObjectExporter.ticket"),
    **_around("release", f"{_SERVER}.ledger:Ledger.release"),
}
STAYING = {
    **_around("send", f"{_SERVER}.replicas.fleet:Fleet.score"),
    **_around("stay", f"{_SERVER}.replicas.stores:Stores.put"),
    **_around("publish", f"{_SERVER}.ledger:Ledger.publish"),
    "before revoke": Point(f"{_SERVER}.replicas.stores:Stores.revoke", Side.BEFORE),
    **_TICKETS,
}
PUTTING = {
    **_around("seal", f"{_SERVER}.ledger:Ledger.seal_payload"),
    **_around("grant", f"{_SERVER}.ledger:Ledger._grant"),
    **_around("put", f"{_SERVER}.exporters.ray_object:RayObjectExporter._put"),
    **_TICKETS,
}
SERVER = SCORING | REGISTRY | ANNOUNCING | STAYING | PUTTING


class Stops:
    """The points of one process.

    Args:
        tell: called with a point's name on the thread that has come to it.
    """

    def __init__(self, points: dict[str, Point], tell: Callable[[str], None]) -> None:
        self._points = points
        self._tell = tell
        self._armed = ""
        self._wrapped: set[str] = set()
        self._lock = threading.Lock()
        self._go = threading.Event()

    def arm(self, name: str) -> None:
        """Stop at a point, once: at the next that comes to it. No name disarms."""
        if name in self._points and name not in self._wrapped:
            self._wrap(name, self._points[name])
            self._wrapped.add(name)
        with self._lock:
            self._armed = name
            self._go.clear()

    def go(self) -> None:
        """Let whoever stopped go on."""
        self._go.set()

    def at(self, name: str) -> None:
        """Stop here, if this is the armed point."""
        with self._lock:
            mine, self._armed = self._armed == name, "" if self._armed == name else self._armed
        if mine:
            self._tell(name)
            self._go.wait(PATIENCE_SECONDS)

    def _wrap(self, name: str, point: Point) -> None:
        wrap(point, functools.partial(self.at, name))


def wrap(point: Point, at: Callable[[], None]) -> Callable[[], None]:
    """Have ``at`` called wherever a point is come to; return what undoes that."""
    owner, attribute = point.owner()
    function = getattr(owner, attribute)

    def chunks(found: Iterator[object]) -> Iterator[object]:
        for number, chunk in enumerate(found):
            if number == 1:
                at()
            yield chunk

    @functools.wraps(function)
    def wrapped(*arguments: object, **given: object) -> object:
        if point.side is Side.BEFORE:
            at()
        result = function(*arguments, **given)
        if point.side is Side.AFTER:
            at()
        return chunks(result) if point.side is Side.CHUNK else result

    setattr(owner, attribute, wrapped)
    return functools.partial(setattr, owner, attribute, function)
