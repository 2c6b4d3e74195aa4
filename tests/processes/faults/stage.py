"""The stage: plays one scenario after the other with the same cast, and asks the oracle.

A bystander scores on throughout and must not notice, unless it is the server that comes to
harm: then its calls end with an error of the tree, in their time, and those after the server's
return are answered.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from signal import SIGCONT, SIGKILL, SIGSTOP, Signals
from typing import Protocol, TypeVar

import pytest
from tests.processes.faults.cast import Cast, Role
from tests.processes.faults.oracle import Oracle
from tests.processes.faults.scenarios import Means, Scenario
from tests.processes.faults.workers import PATIENCE_SECONDS, Worker

SHORT_SECONDS = 0.5
"""The deadline of a call that cannot be answered."""
TRANSPORTS = ("shared_memory", "stream")


class Victim(Protocol):
    """Whoever can be sent a signal."""

    def signal(self, number: Signals) -> None:
        """Send it; a stop is waited for, and an end."""


class Stage:
    """A cast with its oracle. Between scenarios nobody has a client.

    What is about steps is played by ``step_plays``.
    """

    ways: tuple[str, ...] = TRANSPORTS
    """What everybody has had a session over before it counts what it has."""
    home = "shared_memory"
    """How the bystander reads."""

    def __init__(self, cast: Cast, oracle: Oracle | None = None) -> None:
        self.cast = cast
        self.oracle = oracle or Oracle(cast)
        self._steps = 0
        self.start_server()

    def play(self, scenario: Scenario) -> None:
        """Play a scenario about scores."""
        plays = {
            "student": self._harm_student,
            "server": self._harm_server,
            "student with a worker": self._harm_student_with_a_worker,
            "worker": self._harm_worker,
        }
        plays[scenario.victim](scenario)

    def start_over(self) -> None:
        """Forget a play that failed: begin with others."""
        self.cast.end()
        self.start_server()

    # Who is there

    def start_server(self) -> None:
        """Start a server, and have it make what it makes for its first clients."""
        server = self.cast.start_server()
        self.oracle.note_quiet(server)
        for transport in self.ways:
            self._visit(self.student("bystander"), transport)
        self.oracle.note_warm(server)

    def student(self, name: str) -> Role:
        """Return a student that has no client; a new one has had one of each kind."""
        role = self.cast.role(name)
        if not self.oracle.knows(role):
            for transport in self.ways:
                self._visit(role, transport)
            self.oracle.note_quiet(role)
        return role

    def enter(self, role: Role, transport: str) -> None:
        """Have a student make a client and open a session."""
        role.do("connect", address=self.cast.address)
        assert role.do("open", name="it", transport=transport) == transport

    def step(self) -> int:
        """Return a step that nobody has scored."""
        self._steps += 1
        return self._steps * 1_000_000

    def _visit(self, role: Role, transport: str) -> None:
        self.enter(role, transport)
        role.do("cycle", session="it", step=self.step())
        role.do("end")

    @contextmanager
    def undisturbed(self, way: str = "") -> Iterator[Role]:
        """Have a bystander score on, without an error, for as long as the block takes."""
        role = self.student("bystander")
        self.enter(role, way or self.home)
        self._cycles = role.ask("cycles", session="it", first=self.step())
        yield role
        self.see_progress(role)
        role.do("halt")
        role.answer(self._cycles)
        role.do("end")

    def see_progress(self, bystander: Role) -> None:
        """Wait until a bystander has been served from beginning to end, from now on."""
        bystander.do("halt")
        assert bystander.answer(self._cycles) >= 1
        self._cycles = bystander.ask("cycles", session="it", first=self.step())

    def await_leases(self, role: Role, count: int) -> None:
        """Wait until the server counts so many leases of a role that shares memory."""

        def leases() -> int:
            sessions = self.cast.inspect().sessions
            return sum(each.lease_count for each in sessions if each.pid == role.pid)

        await_true(lambda: leases() == count, f"{role} has {count} leases")

    # Students

    def _harm_student(self, scenario: Scenario) -> None:
        victim = self.student("victim")
        with self.undisturbed() as bystander:
            self.enter(victim, scenario.transport)
            victim.do("arm", name=scenario.moment)
            call = victim.ask("cycle", session="it", step=self.step())
            victim.await_point()
            self.harm(victim, scenario.means, bystander)
            if not victim.is_alive:
                return
            victim.do("go")
            self.answered(victim, call, scenario)
            victim.do("end")

    def answered(self, role: Role, call: int, scenario: Scenario) -> None:
        """Wait for an answer. Who has no line may have stood for longer than its session lives."""
        error = role.end_of(call)
        assert error is None or scenario.transport != "shared_memory", error

    def harm(self, victim: Victim, means: Means, bystander: Role) -> None:
        """Do it. A victim that is stopped stays so until others were served."""
        if means is not Means.KILL:
            victim.signal(SIGSTOP)
            self.see_progress(bystander)
        victim.signal(SIGCONT if means is Means.STOP_AND_GO_ON else SIGKILL)

    # Forked workers

    @contextmanager
    def worker_of(self, student: Role) -> Iterator[Worker]:
        """Have a student hold a payload, and fork a worker that reads it too."""
        self.enter(student, "shared_memory")
        student.do("score", session="it", step=self.step(), name="kept")
        with self.cast.listener() as listener:
            student.do("fork", name="kept", path=listener.getsockname())
            worker = Worker(listener)
        try:
            worker.read()
            yield worker
        finally:
            worker.kill()

    def _harm_student_with_a_worker(self, scenario: Scenario) -> None:
        victim = self.student("victim")
        with self.undisturbed() as bystander:
            with self.worker_of(victim) as worker:
                self.harm(victim, scenario.means, bystander)
                worker.read()
                if victim.is_alive:
                    victim.do("read", name="kept")
                    victim.do("close", name="kept")
                self.await_leases(victim, 1)  # the worker's
                self.see_progress(bystander)
                worker.read()
                worker.kill()
                self.await_leases(victim, 0)
            if victim.is_alive:
                victim.do("end")

    def _harm_worker(self, scenario: Scenario) -> None:
        student = self.student("victim")
        with self.undisturbed() as bystander:
            with self.worker_of(student) as worker:
                self.harm(worker, scenario.means, bystander)
                student.do("read", name="kept")
                student.do("close", name="kept")
                if scenario.means is Means.STOP_AND_GO_ON:
                    self.await_leases(student, 1)
                    worker.read()
                    worker.kill()
                self.await_leases(student, 0)
            student.do("end")

    # The server

    def _harm_server(self, scenario: Scenario) -> None:
        server = self.cast.server
        bystander, caller = self.student("bystander"), self.student("victim")
        self.enter(bystander, self.home)
        self.enter(caller, scenario.transport)
        bystander.do("score", session="it", step=self.step(), name="kept")
        server.do("arm", name=scenario.moment)
        call = caller.ask("cycle", session="it", step=self.step())
        server.await_point()
        if scenario.means is not Means.KILL:
            server.signal(SIGSTOP)
            late = bystander.ask("cycle", session="it", step=self.step(), timeout=SHORT_SECONDS)
            bystander.error_of(late)
        bystander.do("read", name="kept")
        if scenario.means is Means.STOP_AND_GO_ON:
            server.signal(SIGCONT)
            server.do("go")
            self._go_on(caller, call, bystander, scenario)
        else:
            server.signal(SIGKILL)
            self._come_back(caller, call, bystander)
        for role in (bystander, caller):
            role.do("end")

    def _go_on(self, caller: Role, call: int, bystander: Role, scenario: Scenario) -> None:
        """See everybody served as if nothing had been."""
        self.answered(caller, call, scenario)
        bystander.do("close", name="kept")
        bystander.do("cycle", session="it", step=self.step())

    def _come_back(self, caller: Role, call: int, bystander: Role) -> None:
        """See everybody told, what was leased still good, and a new server serve them anew."""
        caller.end_of(call)
        bystander.error_of(bystander.ask("cycle", session="it", step=self.step()))
        bystander.do("read", name="kept")
        self.bring_server_back([caller, bystander])
        for role in (caller, bystander):
            self.enter(role, self.home)
            role.do("cycle", session="it", step=self.step())

    def bring_server_back(self, roles: Sequence[Role]) -> None:
        """Start a server in the place of one that is dead, while its clients are there.

        They let go of what they had of the old one, which is then nowhere any more.
        """
        server = self.cast.start_server()
        self.oracle.note_quiet(server)
        for role in roles:
            role.do("end")
        self.oracle.check_roles()
        for transport in self.ways:
            self._visit(roles[-1], transport)
        self.oracle.note_warm(server)


AnyStage = TypeVar("AnyStage", bound=Stage)


def in_order(stage: AnyStage, session: pytest.Session) -> Iterator[AnyStage]:
    """Lend a stage to one test, after which nothing must be left on it.

    After a failure, the next test finds others on it.
    """
    failed = session.testsfailed
    yield stage
    if session.testsfailed > failed:
        sys.stdout.write(stage.cast.place.said())  # shown with the failure
        stage.start_over()
        return
    try:
        stage.oracle.check()
    except BaseException:
        stage.start_over()
        raise


def await_true(look: Callable[[], bool], what: str) -> None:
    """Look at the server again and again until something is so."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not look():
        assert time.monotonic() < until, f"it never came true that {what}"
