"""The role processes: a server, or somebody who uses it, driven over a pipe by the test.

Commands come as (number, name, arguments) and are carried out one after the other on the main
thread; answers go back as (number, "value" or "error", what). ``arm``, ``go``, ``halt`` and
``threads`` are done at once, on the thread that listens, so that a role which stands at a
point can be told. A role whose test is gone ends.
"""

import faulthandler
import gc
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import torch
from tests.processes.faults import stops
from tests.processes.faults.stops import Stops

AT = "at"
READY = "ready"
TELL_STACKS = signal.SIGUSR1
"""Has a role write where each of its threads is into its log."""


class Voice:
    """A role's end of the pipe, for all of its threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def say(self, number: int, kind: str, what: object) -> None:
        """Tell the test."""
        with self._lock:
            self._connection.send((number, kind, what))

    def hear(self) -> tuple[int, str, dict[str, object]]:
        """Return the next command; the role ends where there is none any more."""
        try:
            number, name, arguments = self._connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        return number, name, arguments


class Role:
    """What listens in every role process."""

    points: ClassVar[dict[str, stops.Point]] = {}

    def __init__(self, voice: Voice) -> None:
        self.voice = voice
        self.stops = Stops(self.points, lambda name: voice.say(0, AT, name))
        self.halted = threading.Event()
        self._commands: queue.SimpleQueue[tuple[int, str, dict[str, object]]] = queue.SimpleQueue()

    def live(self) -> None:
        """Carry out commands for ever."""
        threading.Thread(target=self.listen, name="listen", daemon=True).start()
        while True:
            number, name, arguments = self._commands.get()
            self._answer(number, lambda: getattr(self, name)(**arguments))  # noqa: B023

    def listen(self) -> None:
        """Do what can be done at once, and put the rest on the main thread's list."""
        at_once: dict[str, Callable[..., object]] = {
            "arm": self.stops.arm,
            "go": self.stops.go,
            "halt": self.halted.set,
            "threads": lambda: sorted(thread.name for thread in threading.enumerate()),
        }
        while True:
            number, name, arguments = self.voice.hear()
            if name in at_once:
                self._answer(number, lambda: at_once[name](**arguments))  # noqa: B023
            else:
                self._commands.put((number, name, arguments))

    def _answer(self, number: int, call: Callable[[], object]) -> None:
        try:
            value = call()
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            self.voice.say(number, "error", (kinds, str(error), traceback.format_exc()))
        else:
            self.voice.say(number, "value", value)

    def collect(self) -> None:
        """Have what is garbage gone."""
        gc.collect()


class ServerRole(Role):
    """A real ``teacher-logits serve`` on the main thread; the rest of the role is a thread."""

    points = stops.SERVER

    def serve(self, arguments: list[str]) -> None:
        """Serve until told to stop, and end with the command's exit code."""
        from teacher_logits.__main__ import main

        reading, writing = os.pipe()
        threading.Thread(target=self.listen, name="listen", daemon=True).start()
        threading.Thread(target=self._say_ready, args=(reading,), daemon=True).start()
        code = main(["serve", *arguments, "--ready-fd", str(writing)])
        sys.stderr.flush()
        os._exit(code)

    def _say_ready(self, reading: int) -> None:
        with os.fdopen(reading) as pipe:
            line = pipe.read()
        self.voice.say(0, READY, line)


def run(kind: str, connection: Connection, log: str, arguments: list[str]) -> None:
    """Be a role; the target of its process."""
    with Path(log).open("ab", buffering=0) as output:
        for fd in (1, 2):
            os.dup2(output.fileno(), fd)
    faulthandler.register(TELL_STACKS)
    torch.set_num_threads(1)
    voice = Voice(connection)
    if kind == "server":
        ServerRole(voice).serve(arguments)
    elif kind == "publisher":
        from tests.processes.faults.publisher import PublisherRole

        PublisherRole(voice).live()
    else:
        from tests.processes.faults.student import StudentRole

        if arguments:
            _join(*arguments)
        StudentRole(voice).live()


def _join(address: str) -> None:
    """Be a driver of the Ray cluster at an address."""
    import ray

    ray.init(address, namespace="students", logging_level=logging.ERROR, log_to_driver=False)
