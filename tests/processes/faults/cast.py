"""The cast of a module's scenarios: role processes of a folder of their own, reused and replaced.

Roles come from multiprocessing's fork server, which has torch imported: a new one costs
milliseconds, not seconds; those in a Ray cluster's workers are that cluster's. Whoever is ended is
ended by pid, and whatever is waited for has a deadline: answers come over the pipe, and the kernel
tells of a process's end.
"""

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from tests.processes.faults.place import Place
from tests.processes.faults.roles import AT, READY, TELL_STACKS, run
from tests.processes.faults.workers import PATIENCE_SECONDS
from tests.stopping import await_stopped

from teacher_logits.views import ServerView
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_client.config import parse_address

_PRELOAD = [
    "tests.processes.faults.content",
    "tests.processes.faults.student",
    "teacher_logits_client.client",
    "teacher_logits_server.app",
]


class RoleError(Exception):
    """What a role was told to do failed there. ``kinds`` are the names of the error's classes."""

    def __init__(self, role: str, kinds: Sequence[str], message: str, trace: str) -> None:
        super().__init__(f"{role}: {kinds[0]}: {message}\n{trace}")
        self.kinds = tuple(kinds)
        self.message = message

    @property
    def is_typed(self) -> bool:
        """Whether it is an error of the product's tree."""
        return "TeacherLogitsError" in self.kinds


class Process(Protocol):
    """What a role runs in."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


def forked(kind: str, log: Path, arguments: Sequence[str] = ()) -> "Role":
    """Fork a role's process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=run, args=(kind, theirs, str(log), list(arguments)), daemon=True
    )
    process.start()
    theirs.close()
    return Role(kind, pipe, process)


class Role:
    """A role process. Any call fails after a deadline rather than wait for ever."""

    def __init__(self, kind: str, pipe: Connection, process: Process) -> None:
        self.kind = kind
        self._pipe = pipe
        self._process = process
        assert process.pid is not None
        self.pid = process.pid
        self._next = 0
        self._said: list[tuple[int, str, Any]] = []

    def __repr__(self) -> str:
        return f"{self.kind} {self.pid}"

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.is_alive()

    def ask(self, command: str, /, **arguments: object) -> int:
        """Send a command; return its number, for ``answer``."""
        self._next += 1
        self._pipe.send((self._next, command, arguments))
        return self._next

    def answer(self, number: int, *, within: float = PATIENCE_SECONDS) -> Any:
        """Wait for the answer to a command.

        Raises:
            RoleError: the command failed.
        """
        kind, what = self._await(lambda said: said[0] == number and said[1] != AT, within)
        if kind == "error":
            raise RoleError(repr(self), *what)
        return what

    def do(self, command: str, /, **arguments: object) -> Any:
        """Have a command done."""
        return self.answer(self.ask(command, **arguments))

    def end_of(self, number: int, *, within: float = PATIENCE_SECONDS) -> RoleError | None:
        """Wait for the end of a command, and return the product's error that it failed with.

        Raises:
            RoleError: it failed with another.
        """
        try:
            self.answer(number, within=within)
        except RoleError as error:
            if not error.is_typed:
                raise
            return error
        return None

    def error_of(self, number: int) -> RoleError:
        """Wait for the error of a command that must fail with one of the product's."""
        error = self.end_of(number)
        assert error is not None, f"{self} was answered"
        return error

    def await_point(self) -> None:
        """Wait until the role stands at the point that was armed."""
        self._await(lambda said: said[1] == AT, PATIENCE_SECONDS)

    @property
    def pipe(self) -> Connection:
        """What it says comes there."""
        return self._pipe

    def stands(self) -> bool:
        """Whether it has come to the point that was armed; says so once."""
        self._hear()
        said = next((each for each in self._said if each[1] == AT), None)
        if said is not None:
            self._said.remove(said)
        return said is not None

    def has_said(self, number: int) -> bool:
        """Whether a command has ended."""
        self._hear()
        return any(each[0] == number and each[1] != AT for each in self._said)

    def _hear(self) -> None:
        """Take in what lies in the pipe."""
        while self.is_alive and self._pipe.poll():
            self._said.append(self._pipe.recv())

    def await_ready(self) -> dict[str, Any]:
        """Wait until a server serves; return what it tells then."""
        _, line = self._await(lambda said: said[1] == READY, PATIENCE_SECONDS)
        found: dict[str, Any] = json.loads(line)
        return found

    def _await(self, wanted: Any, within: float) -> tuple[str, Any]:
        until = time.monotonic() + within
        while True:
            for said in self._said:
                if wanted(said):
                    self._said.remove(said)
                    return said[1], said[2]
            if not self._pipe.poll(max(0.0, until - time.monotonic())):
                self.tell_stacks()
                raise AssertionError(f"{self} said nothing for {within} s; heard {self._said}")
            try:
                self._said.append(self._pipe.recv())
            except (EOFError, ConnectionResetError):
                raise AssertionError(f"{self} is gone") from None

    def tell_stacks(self) -> None:
        """Have it write where its threads are into its log."""
        os.kill(self.pid, TELL_STACKS)

    # Means

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a stop is waited for, and an end."""
        os.kill(self.pid, number)
        if number is signal.SIGSTOP:
            await_stopped(self.pid)
        elif number is signal.SIGKILL:
            self.await_end()

    def await_end(self) -> int:
        """Wait until the process is no more; return its exit code."""
        self._process.join(PATIENCE_SECONDS)
        assert not self._process.is_alive(), f"{self} lives on"
        self._pipe.close()
        return self._process.exitcode or 0

    def kill(self) -> None:
        """End it whatever it does."""
        if self._process.is_alive():
            self._process.kill()
            self.await_end()


class Cast:
    """A server, and those who use it. A role that is asked for and gone is made anew."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.place = Place(folder)
        self._settings = {
            "engine": "tests.transport_suite.dense_teacher:make",
            "teacher-id": "engine",
            "listen": self.address,
            "pool-size": "1MiB",
            "slab-size": "1MiB",
            "chunk-size": "4KiB",
            "session-ttl": "2s",
            "renew-interval": "500ms",
            "keep-deserted": "0s",
            **settings,
        }
        self._roles: dict[str, Role] = {}

    @property
    def address(self) -> str:
        """Where the server listens."""
        return self.place.address

    @property
    def server(self) -> Role:
        """The server."""
        return self._roles["server"]

    def start_server(self) -> Role:
        """Start a server, at the same address as any before it."""
        flags = [text for name, value in self._settings.items() for text in (f"--{name}", value)]
        server = forked("server", self.place.logs / "server", flags)
        self._roles["server"] = server
        server.await_ready()
        return server

    def role(self, name: str, kind: str = "student") -> Role:
        """Return the role of a name."""
        role = self._roles.get(name)
        if role is None or not role.is_alive:
            role = self._roles[name] = self.make(name, kind)
        return role

    def make(self, name: str, kind: str) -> Role:
        """Return a new role."""
        return forked(kind, self.place.logs / name)

    def living(self) -> dict[str, Role]:
        """Return every role that is there."""
        return {name: role for name, role in self._roles.items() if role.is_alive}

    def inspect(self) -> ServerView:
        """Return what the server holds."""
        return inspect_server(parse_address(self.address), timeout=PATIENCE_SECONDS)

    def listener(self) -> socket.socket:
        """Return a socket in the folder for a forked worker to come to."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = self.place.folder / "worker"
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
        return listener

    def end(self) -> None:
        """End every role."""
        for role in self._roles.values():
            role.kill()
