"""How scenarios of registered steps are played: two publishers, and students that acquire.

Each play is a teacher of its own, and three steps: the first is read in peace, somebody comes
to harm around the second, and the third shows that all who are left go on.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGCONT, SIGKILL, SIGSTOP

from tests.processes.faults.cast import Role
from tests.processes.faults.publisher import SHARDS
from tests.processes.faults.scenarios import Means, Scenario
from tests.processes.faults.stage import SHORT_SECONDS, TRANSPORTS, Stage, await_true

PEACE, HARM, REST = 0, 1, 2
"""The steps of a play."""
MANY = 12
"""More steps than there is room for at once."""


class StepPlays:
    """Plays on a stage."""

    reading = ""
    """How steps are read while the server comes to harm, where that is not as they are written."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._teacher = ""
        self._plays = {
            "publisher": self._harm_publisher,
            "student of steps": self._harm_student,
            "student of steps with a worker": self._harm_student_with_a_worker,
            "server of steps": self._harm_server,
            "publisher of announced steps": self._harm_publisher_ahead,
            "student of announced steps": self._harm_student_ahead,
            "server of announced steps": self._harm_server,
        }

    def has(self, scenario: Scenario) -> bool:
        """Whether a scenario is about steps."""
        return scenario.victim in self._plays

    def play(self, scenario: Scenario) -> None:
        """Play a scenario."""
        other = random.Random(scenario.seed).choice(TRANSPORTS)
        self._plays[scenario.victim](scenario, other)

    # Who is there

    def publisher(self, shard: int) -> Role:
        """Return a publisher that has no client."""
        return self._stage.cast.role(f"publisher {shard}", "publisher")

    def open(self, role: Role, shard: int, transport: str) -> None:
        """Open a publisher; where the last of its shard was killed the server waits for its end."""
        role.do(
            "enter",
            address=self._stage.cast.address,
            teacher=self._teacher,
            shard=shard,
            transport=transport,
        )

    def read_by(self, role: Role, transport: str, student: str) -> None:
        """Have a student open a session with the teacher."""
        role.do("connect", address=self._stage.cast.address)
        got = self.open_session(role, transport, teacher=self._teacher, student=student)
        assert got in (transport.split()[0].split(",")[0], "None"), got

    def open_session(self, role: Role, transport: str, **terms: object) -> str:
        """Have a student open a session; return what it came to."""
        return str(role.do("open", name="it", transport=transport, **terms))

    @contextmanager
    def company(
        self, publishing: str, reading: str, *, moment: str = ""
    ) -> Iterator[tuple[list[Role], Role]]:
        """Have publishers and a reader, who have had a step in peace, and let all go.

        No step comes before the moment in which a slab is passed for the first time.
        """
        self._teacher = f"teacher-{self._stage.step()}"
        publishers = [self.publisher(shard) for shard in range(SHARDS)]
        reader = self._stage.student("reader")
        for shard, role in enumerate(publishers):
            self.open(role, shard, publishing)
        self.read_by(reader, reading, "reader")
        if not moment.endswith("_slab"):
            self.publish(publishers, PEACE)
            reader.do("read_step", session="it", step=PEACE)
        yield publishers, reader
        for name, role in self._stage.cast.living().items():
            if name not in ("server", "bystander"):
                role.do("end")
                if not self._stage.oracle.knows(role):
                    self._stage.oracle.note_quiet(role)  # it has had its first client

    def publish(self, publishers: list[Role], step: int) -> None:
        for call in [(role, role.ask("publish", step=step)) for role in publishers]:
            call[0].answer(call[1])

    # Publishers

    def _harm_publisher(self, scenario: Scenario, other: str) -> None:
        with (
            self._stage.undisturbed() as bystander,
            self.company(scenario.transport, other, moment=scenario.moment) as (
                (victim, second),
                reader,
            ),
        ):
            second.do("publish", step=HARM)
            read = reader.ask("acquire", session="it", step=HARM)
            if scenario.moment == "while it is read":
                victim.do("publish", step=HARM)
                reader.answer(read)
                self._stage.harm(victim, scenario.means, bystander)
                reader.do("read")
                victim = self._bring_back(victim, scenario)
            else:
                victim.do("arm", name=scenario.moment)
                call = victim.ask("publish", step=HARM)
                victim.await_point()
                self._stage.harm(victim, scenario.means, bystander)
                if victim.is_alive:
                    victim.do("go")
                    self._stage.answered(victim, call, scenario)
                victim = self._bring_back(victim, scenario)
                self._answer(reader, read)
            reader.do("close")
            self.publish([victim, second], REST)
            reader.do("read_step", session="it", step=REST)

    def _harm_publisher_ahead(self, scenario: Scenario, other: str) -> None:
        """A publisher comes to harm while its reader has the step open, sealed or not."""
        self._harm_publisher(scenario, "shared_memory")

    def _bring_back(self, victim: Role, scenario: Scenario) -> Role:
        """Have the first publisher there again, and the step whole."""
        role = self.publisher(0)
        if role is not victim:
            self.open(role, 0, scenario.transport)
        elif scenario.transport == "shared_memory":
            return role
        error = role.end_of(role.ask("publish", step=HARM))
        if error is not None and "PayloadRetiredError" not in error.kinds:
            assert role is victim, error  # which stood for longer than its session lives
            self.open(role, 0, scenario.transport)
            role.do("publish", step=HARM)
        return role

    def _answer(self, reader: Role, read: int) -> None:
        """Wait until a reader has its step, asked for again where a producer was lost."""
        error = reader.end_of(read)
        if error is not None:
            assert "ProducerLostError" in error.kinds, error
            reader.do("acquire", session="it", step=HARM)

    # Students

    def _harm_student(self, scenario: Scenario, other: str) -> None:
        with (
            self._stage.undisturbed() as bystander,
            self.company(other, scenario.transport) as (publishers, reader),
        ):
            victim = self._victim(scenario)
            victim.do("arm", name=scenario.moment)
            self.publish(publishers, HARM)
            call = victim.ask("read_step", session="it", step=HARM)
            victim.await_point()
            reader.do("read_step", session="it", step=HARM)
            self._stage.harm(victim, scenario.means, bystander)
            if victim.is_alive:
                victim.do("go")
                self._stage.answered(victim, call, scenario)
                victim.do("end")
            self.await_leave("victim")
            self.publish(publishers, REST)
            reader.do("read_step", session="it", step=REST)

    def _harm_student_ahead(self, scenario: Scenario, other: str) -> None:
        """A student comes to harm that has a step open which is being written."""
        with (
            self._stage.undisturbed() as bystander,
            self.company("shared_memory", "shared_memory") as (publishers, reader),
        ):
            writer, second = publishers
            victim = self._victim(scenario)
            second.do("publish", step=HARM)
            writer.do("arm", name="write")
            written = writer.ask("publish", step=HARM)
            writer.await_point()
            victim.do("arm", name=scenario.moment)
            call = victim.ask("read_step", session="it", step=HARM)
            victim.await_point()
            read = reader.ask("read_step", session="it", step=HARM)
            self._stage.harm(victim, scenario.means, bystander)
            writer.do("go")
            writer.answer(written)
            reader.answer(read)
            if victim.is_alive:
                victim.do("go")
                victim.answer(call)
                victim.do("end")
            self.await_leave("victim")
            self.publish(publishers, REST)
            reader.do("read_step", session="it", step=REST)

    def await_leave(self, student: str) -> None:
        """Wait until a student has no session: steps wait for it no more."""
        await_true(
            lambda: all(s.student_id != student for s in self._stage.cast.inspect().sessions),
            f"student {student} is gone",
        )

    def _victim(self, scenario: Scenario) -> Role:
        victim = self._stage.student("victim")
        self.read_by(victim, scenario.transport, "victim")
        return victim

    def _harm_student_with_a_worker(self, scenario: Scenario, other: str) -> None:
        """The room of a step is not used again while a forked worker reads there."""
        with (
            self._stage.undisturbed() as bystander,
            self.company("shared_memory", other) as (publishers, reader),
        ):
            victim = self._stage.student("victim")
            victim.do("connect", address=self._stage.cast.address)
            # Rank 0 of 2: what it reads is one shard, and so a view of the publisher's slab.
            for name, rank in (("it", 0), ("else", 1)):
                victim.do("open", name=name, teacher=self._teacher, rank=rank, dp=2)
            self.publish(publishers, HARM)
            reader.do("read_step", session="it", step=HARM)
            victim.do("read_step", session="else", step=HARM)
            victim.do("acquire", session="it", step=HARM, name="kept")
            with self._stage.worker_of(victim) as worker:
                self._stage.harm(victim, scenario.means, bystander)
                if victim.is_alive:
                    victim.do("close", name="kept")
                    for name in ("it", "else"):
                        victim.do("leave", session=name)
                # No step waits for whoever has died or closed its session, whoever still reads.
                for step in range(REST, MANY):
                    self.publish(publishers, step)
                    reader.do("read_step", session="it", step=step)
                    worker.read()
            self.publish(publishers, MANY)
            reader.do("read_step", session="it", step=MANY)

    # The server

    def _harm_server(self, scenario: Scenario, other: str) -> None:
        stage = self._stage
        reading = self.reading or scenario.transport
        with self.company(scenario.transport, reading, moment=scenario.moment) as (
            publishers,
            reader,
        ):
            server = stage.cast.server
            bystander = stage.student("victim")
            stage.enter(bystander, stage.home)
            server.do("arm", name=scenario.moment)
            calls = [(role, role.ask("publish", step=HARM)) for role in publishers]
            calls.append((reader, reader.ask("read_step", session="it", step=HARM)))
            server.await_point()
            if scenario.means is not Means.KILL:
                server.signal(SIGSTOP)
                late = bystander.ask(
                    "cycle", session="it", step=stage.step(), timeout=SHORT_SECONDS
                )
                bystander.error_of(late)
            if scenario.means is Means.STOP_AND_GO_ON:
                server.signal(SIGCONT)
                server.do("go")
                for role, call in calls:
                    self._stage.answered(role, call, scenario)
                bystander.do("cycle", session="it", step=stage.step())
            else:
                server.signal(SIGKILL)
                for role, call in calls:
                    role.end_of(call)
                stage.bring_server_back([*publishers, reader, bystander])
        if scenario.means is not Means.STOP_AND_GO_ON:
            with self.company(scenario.transport, other):
                pass
