"""A cast within one process: the server and its students are threads of the test's own.

So they read over ``local``. A thread cannot be killed. It is *dropped* where it stands: what it was
doing ends with an exception that is none of Python's errors, as an interrupt's is, and all that it
had is garbage, unclosed. Or memory *fails* there, and it is told so and goes on.
"""

import faulthandler
import gc
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, TypeAlias, cast

from tests.processes.faults import roles
from tests.processes.faults.cast import Cast, Role
from tests.processes.faults.oracle import Oracle, census_of
from tests.processes.faults.publisher import PublisherRole
from tests.processes.faults.roles import Voice
from tests.processes.faults.stops import Point, Stops, wrap
from tests.processes.faults.student import StudentRole
from tests.transport_suite.dense_teacher import DenseTeacher

from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig

POOL_BYTES = 1 << 20


class Dropped(BaseException):
    """Ends a thread where it stands."""


class InjectedError(MemoryError):
    """There is no memory at a point."""


_Living: TypeAlias = "weakref.WeakSet[ThreadStops]"


class ThreadStops(Stops):
    """The points of one role of several in the process: its own threads stop there alone."""

    living: ClassVar[_Living] = weakref.WeakSet()
    undo: ClassVar[dict[str, Callable[[], None]]] = {}

    def __init__(self, points: dict[str, Point], tell: Callable[[str], None]) -> None:
        super().__init__(points, tell)
        self.threads: Callable[[], set[threading.Thread | None]] = set
        self._fate = ""
        self.living.add(self)

    def go(self, fate: str = "") -> None:
        """Let whoever stopped go on, or have it "dropped" there, or "failed"."""
        self._fate = fate
        super().go()

    def at(self, name: str) -> None:
        """Stop here, if this is the armed point; raise what was said meanwhile."""
        super().at(name)
        fate, self._fate = self._fate, ""
        if fate:
            raise Dropped if fate == "dropped" else InjectedError(f"no memory {name}")

    def _wrap(self, name: str, point: Point) -> None:
        if name not in self.undo:
            self.undo[name] = wrap(point, lambda: _come_to(name))


def _come_to(name: str) -> None:
    here = threading.current_thread()
    for stops in list(ThreadStops.living):
        if here in stops.threads():
            stops.at(name)


class ThreadVoice(Voice):
    """A role's end of the pipe; the thread that listens ends where there is none any more."""

    def hear(self) -> tuple[int, str, dict[str, object]]:
        """Return the next command."""
        try:
            number, name, arguments = self._connection.recv()
        except (EOFError, OSError):
            raise Dropped from None
        return number, name, arguments


class _InThread(roles.Role):
    """A role that ends with its thread, and not with the process."""

    def listen(self) -> None:
        """Listen until nobody speaks."""
        with suppress(Dropped):
            super().listen()

    def depart(self) -> None:
        """End the thread."""
        raise Dropped


class Student(_InThread, StudentRole):
    """A student that is a thread."""

    def holds(self) -> list[str]:
        """Return the names of what it holds."""
        return sorted(self.held)


class Publisher(_InThread, PublisherRole):
    """A publisher that is a thread."""


def _live(kind: str, voice: Voice) -> None:
    """Be a role: the target of its thread."""
    role = Student(voice) if kind == "student" else Publisher(voice)
    stops = ThreadStops(role.points, role.stops._tell)
    role.stops = stops
    known, here = weakref.ref(role), threading.current_thread()

    def threads() -> set[threading.Thread | None]:
        role = known()
        client = None if role is None else role.client
        return {here, None if client is None else client._returner._thread}

    stops.threads = threads
    with suppress(Dropped):
        role.live()


class RoleThread:
    """What a role runs in."""

    exitcode = 0
    pid = os.getpid()

    def __init__(self, thread: threading.Thread, depart: Callable[[], object]) -> None:
        self._thread = thread
        self._depart = depart

    def is_alive(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._thread.join(timeout)

    def kill(self) -> None:
        """Have it end."""
        self._depart()


def started(name: str, kind: str) -> Role:
    """Start a role's thread."""
    pipe, theirs = multiprocessing.Pipe()
    thread = threading.Thread(
        target=_live, args=(kind, ThreadVoice(theirs)), name=f"role {kind}", daemon=True
    )
    thread.start()
    return Role(kind, pipe, RoleThread(thread, lambda: pipe.send((0, "depart", {}))))


class HouseServer:
    """The server's threads, as the oracle looks at them: all that this process has."""

    kind = "server"
    pid = os.getpid()
    is_alive = True

    def do(self, command: str) -> list[str]:
        """Tell the names of the process's threads."""
        assert command == "threads"
        return sorted(thread.name for thread in threading.enumerate())


_PROCESS = cast("Role", HouseServer())


class House(Cast):
    """A server in this process, and roles that are its threads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._serving = ExitStack()
        faulthandler.register(roles.TELL_STACKS)

    @property
    def is_serving(self) -> bool:
        """Whether there is a server."""
        return "server" in self._roles

    def start_server(self) -> Role:
        """Start a server, at the same address as any before it."""
        config = ServerConfig(
            listen=(self.address,),
            teacher_id="engine",
            pool_size_bytes=POOL_BYTES,
            slab_size_bytes=POOL_BYTES,
            chunk_bytes=4096,
            session_ttl=timedelta(seconds=2),
            renew_interval=timedelta(seconds=0.5),
            keep_deserted=timedelta(),
        )
        self._serving.enter_context(serve_in_thread(config, DenseTeacher()))
        self._roles["server"] = _PROCESS
        return _PROCESS

    def stop_server(self) -> None:
        """Have it stop as it does where its block ends, and wait for that."""
        del self._roles["server"]
        self._serving.close()

    def make(self, name: str, kind: str) -> Role:
        """Return a new role."""
        return started(name, kind)

    def end(self) -> None:
        """End every role, and the server; leave the product as it was."""
        if self.is_serving:
            self.stop_server()
        for role in self._roles.values():
            role.kill()
        self._roles.clear()
        for name in list(ThreadStops.undo):
            ThreadStops.undo.pop(name)()


class HouseOracle(Oracle):
    """Holds the whole process against what it was when it was quiet."""

    def note_house(self) -> None:
        """Take what the process has now as what it has when it is quiet."""
        gc.collect()
        self.note_quiet(_PROCESS)

    def _roles_wrong(self) -> list[str]:
        gc.collect()
        growth = census_of(_PROCESS).growth(self._quiet[_PROCESS.pid])
        return [f"process: {each}" for each in growth]
