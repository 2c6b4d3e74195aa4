"""Processes that publish and read as a test tells them, each with a fake driver of its own.

A worker is one process: a test asks it call by call, and it answers with a value or with the
error that the call raised. Workers are started once and used by many tests; ``reset`` closes
whatever a test left open.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tests.cuda.work import Work
from tests.stopping import stop

from teacher_logits.errors import SessionRefusedError, TeacherLogitsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PATIENCE_SECONDS = 30
READ_SECONDS = 10.0
"""How long a publisher may take to learn that all is read: its readers have let go of it."""
ROOT = Path(__file__).parents[2]
UNSHARE = ("unshare", "-Urpf", "--mount-proc", "--kill-child")


@dataclass(frozen=True, kw_only=True)
class Told:
    """An error of ours in a worker, in plain values."""

    kind: str
    message: str
    facts: Mapping[str, object]
    rules: tuple[str, ...] = ()


class WorkerError(Exception):
    """A worker's call raised an error of ours."""

    def __init__(self, told: Told) -> None:
        super().__init__(f"{told.kind}: {told.message}")
        self.told = told


class Worker:
    """A worker, as the test sees it."""

    #: Whether it was asked and has not answered.
    owes_answer = False

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "teacher_logits_client.client"])
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=live, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    def stop(self) -> None:
        """Stop it, as SIGSTOP does."""
        stop(self.pid)

    def go_on(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def start(self, call: str, *args: object, **given: object) -> None:
        """Ask, and do not wait."""
        self.owes_answer = True
        self._pipe.send((call, args, given))

    def answer(self) -> object:
        """Wait for the answer to the last question.

        Raises:
            WorkerError: the call raised an error of ours.
        """
        assert self._pipe.poll(PATIENCE_SECONDS), f"worker {self.name} says nothing"
        try:
            said = self._pipe.recv()
        except EOFError:
            self._process.join(PATIENCE_SECONDS)
            raise AssertionError(
                f"worker {self.name} ended with {self._process.exitcode}"
            ) from None
        self.owes_answer = False
        if isinstance(said, Told):
            raise WorkerError(said)
        (value,) = said
        return value

    def ask(self, call: str, *args: object, **given: object) -> object:
        """Ask, and wait for the answer."""
        self.start(call, *args, **given)
        return self.answer()

    def kill(self) -> None:
        """End it by SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.join(PATIENCE_SECONDS)
        self._pipe.close()


class Stranger(Worker):
    """A worker in a PID namespace of its own, with a /proc of its own."""

    def __init__(self) -> None:
        self.name = "stranger"
        ours, theirs = socket.socketpair()
        self._unshared = subprocess.Popen(
            [*UNSHARE, sys.executable, "-m", "tests.cuda.stranger", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )
        theirs.close()
        self._pipe = Connection(ours.detach())

    def kill(self) -> None:
        """End it, and wait for its end."""
        self._pipe.close()
        self._unshared.kill()
        self._unshared.wait(PATIENCE_SECONDS)


def can_unshare() -> bool:
    """Say whether this system lets its users make namespaces."""
    try:
        return not subprocess.run([*UNSHARE, "true"], capture_output=True).returncode
    except FileNotFoundError:
        return False


def live(pipe: Connection) -> None:
    """Be a worker, until the pipe's end."""
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is no garbage, and costs a tenth of a second each time
    work = Work()
    while True:
        try:
            call, args, given = pipe.recv()
        except EOFError:
            os._exit(0)
        method: Callable[..., object] = getattr(work, call)
        try:
            pipe.send((method(*args, **given),))
        except TeacherLogitsError as error:
            rules = tuple(each.rule for each in getattr(error, "violations", ()))
            facts = dict(error.facts)
            if isinstance(error, SessionRefusedError):
                facts = {
                    **facts,
                    **{k: v for each in error.violations for k, v in each.facts.items()},
                }
            pipe.send(
                Told(kind=type(error).__name__, message=error.message, facts=facts, rules=rules)
            )
        except Exception:
            pipe.send(Told(kind="broken", message=traceback.format_exc(), facts={}))


class Crew:
    """Workers that a module shares, made as they are needed and anew where they were killed."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        #: Those that a test killed.
        self.dead: list[int] = []

    def __getitem__(self, name: str) -> Worker:
        worker = self._workers.get(name)
        if worker is not None and not worker.is_alive:
            self.dead.append(worker.pid)
            worker = None
        if worker is None:
            worker = self._workers[name] = Worker(name)
        return worker

    @property
    def killed(self) -> set[int]:
        """The processes that a test has killed, whenever."""
        return {*self.dead, *(each.pid for each in self._workers.values() if not each.is_alive)}

    def reset(self, *, read_within: float = READ_SECONDS) -> None:
        """Close what is open in each; raise what they have to say about it.

        Whoever has something to say, or says nothing, is ended: the next test has another.
        """
        for worker in list(self._workers.values()):
            if not worker.is_alive or worker.owes_answer:  # it failed while it was at something
                self._bury(worker)
        wrong: list[str] = []
        # Readers first: what a publisher leaves unread is kept for whoever may yet come.
        for call, *args in (("stop_reading",), ("stop_writing", read_within), ("reset",)):
            every = list(self._workers.values())
            for worker in every:
                worker.start(str(call), *args)
            for worker in every:
                said = _said(worker)
                if said:
                    wrong.append(f"{worker.name}, {call}: {said}")
                    self._bury(worker)
        assert not wrong, "; ".join(wrong)

    def _bury(self, worker: Worker) -> None:
        worker.kill()
        self.dead.append(worker.pid)
        del self._workers[worker.name]

    def end(self) -> None:
        """End them."""
        for worker in self._workers.values():
            worker.kill()


def _said(worker: Worker) -> str:
    """Return what a worker has to say of a call that should come to nothing."""
    try:
        return str(worker.answer() or "")
    except (WorkerError, AssertionError, OSError) as error:
        return str(error)


@contextmanager
def crew() -> Iterator[Crew]:
    """A crew for the block."""
    made = Crew()
    try:
        yield made
    finally:
        made.end()
