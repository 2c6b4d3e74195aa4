"""The stage over a Ray cluster, and the plays that are Ray's alone.

The bystander reads objects and nothing else, and must not notice who comes to harm; only where
that is who hands out what the server put, or puts it, it may be streamed to.
"""

from collections.abc import Callable, Mapping
from signal import SIGCONT, SIGKILL, SIGSTOP

from tests.processes.faults.cast import Role
from tests.processes.faults.scenarios import Means, Scenario
from tests.processes.faults.stage import Stage, await_true
from tests.processes.faults.step_plays import HARM, REST, StepPlays
from tests.ray.faults.cast import Helper, RayCast, RayOracle
from tests.ray.faults.scenarios import (
    COPIED,
    ELSE_STREAMED,
    OF_REPLICAS,
    OF_SERVER,
    RAY_PROCESS,
    READERS,
)

SOON_SECONDS = 18.0
"""Less than the deadline of the call that is waited for."""
LOST = {"ObjectLostError", "DeadlinePassedError"}
"""What a reader of objects alone may be told, where who hands them out comes to harm."""


class RayStage(Stage):
    """A cast over a cluster, with its oracle."""

    ways = (*READERS, "stream")  # the last has the server make a slab of its own
    home = COPIED
    cast: RayCast

    def __init__(self, cast: RayCast) -> None:
        super().__init__(cast, RayOracle(cast))

    def enter(self, role: Role, transport: str) -> None:
        """Have a student make a client and open a session."""
        role.do("connect", address=self.cast.address)
        assert open_over(role, transport) == first_of(transport)

    def play(self, scenario: Scenario) -> None:
        """Play a scenario."""
        await_true(self.cast.is_whole, "all replicas are ready and the cluster is joined")
        steps = RayStepPlays(self)
        plays: Mapping[str, Callable[[Scenario], None]] = {
            "replica": self._harm_replica,
            OF_REPLICAS: self._harm_holder,
        }
        if scenario.victim in plays:
            plays[scenario.victim](scenario)
        elif steps.has(scenario):
            steps.play(scenario)
        else:
            super().play(scenario)

    def see_progress(self, bystander: Role) -> None:
        """As the stage's; what does not come is looked into while it is missing."""
        bystander.do("halt")
        try:
            assert bystander.answer(self._cycles, within=SOON_SECONDS) >= 1
        except AssertionError as error:
            self.cast.server.tell_stacks()
            raise AssertionError(f"{error}; {self.cast.inspect()}") from error
        self._cycles = bystander.ask("cycles", session="it", first=self.step())

    def helper(self, kind: str) -> Helper:
        """Return a process of the server's in the cluster."""
        return self.cast.helper(kind)

    # What is the server's in the cluster

    def _harm_replica(self, scenario: Scenario) -> None:
        """No row is lost with a replica, and nothing that it has answered."""
        reader = self.student("victim")
        with self.undisturbed() as bystander:
            self.enter(reader, scenario.transport)
            victim, means = self.helper("replica"), scenario.means
            if scenario.moment == "before a pass":
                self.harm_helper(victim, means, bystander)
            elif scenario.moment == "during a pass":
                victim.signal(SIGSTOP)
            else:
                reader.do("arm", name="read")
            calls = [reader.ask("cycle", session="it", step=self.step()) for _ in range(2)]
            if scenario.moment == "during a pass":
                await_true(self._has_pass(victim), f"{victim} has a pass")
                victim.signal(SIGCONT if means is Means.STOP_AND_GO_ON else SIGKILL)
            elif scenario.moment == "while it is read":
                reader.await_point()
                self.harm_helper(victim, means, bystander)
                reader.do("go")
            for call in calls:
                reader.answer(call)
            reader.do("end")

    def _has_pass(self, replica: Helper) -> Callable[[], bool]:
        def look() -> bool:
            return any(
                each.pid == replica.pid and (each.outstanding_passes or each.state != "ready")
                for each in self.cast.inspect().replicas
            )

        return look

    def _harm_holder(self, scenario: Scenario) -> None:
        """What a holder of replicas' results had is brought by the server, without an error."""
        reader = self.student("victim")
        with self.undisturbed() as bystander:
            self.enter(reader, scenario.transport)
            reader.do("arm", name=scenario.moment)
            call = reader.ask("cycle", session="it", step=self.step())
            reader.await_point()
            self.harm_helper(self.helper(scenario.victim), scenario.means, bystander)
            reader.do("go")
            reader.answer(call)
            reader.do("end")

    def harm_helper(self, victim: Helper, means: Means, bystander: Role) -> None:
        """Do it. One that is stopped may keep all waiting, so that nobody is waited for then."""
        if means is not Means.KILL:
            victim.signal(SIGSTOP)
            self.cast.inspect()
        victim.signal(SIGCONT if means is Means.STOP_AND_GO_ON else SIGKILL)
        if means is not Means.STOP_AND_GO_ON:
            self.see_progress(bystander)


class RayStepPlays(StepPlays):
    """Plays of registered steps, which are read as objects."""

    reading = COPIED
    _stage: RayStage

    def __init__(self, stage: RayStage) -> None:
        super().__init__(stage)
        self._plays |= {OF_SERVER: self._harm_helper, RAY_PROCESS: self._harm_helper}

    def play(self, scenario: Scenario) -> None:
        """Play a scenario."""
        other = COPIED if scenario.victim in ("publisher", "server of steps") else "shared_memory"
        self._plays[scenario.victim](scenario, other)

    def open_session(self, role: Role, transport: str, **terms: object) -> str:
        """Have a student open a session; return what it came to."""
        return open_over(role, transport, **terms)

    def _harm_helper(self, scenario: Scenario, other: str) -> None:
        with self._stage.undisturbed(ELSE_STREAMED) as bystander:
            with self.company(other, scenario.transport) as (publishers, reader):
                self.publish(publishers, HARM)
                reader.do("arm", name=scenario.moment)
                call = reader.ask("read_step", session="it", step=HARM)
                reader.await_point()
                victim = self._stage.helper(scenario.victim)
                self._stage.harm_helper(victim, scenario.means, bystander)
                reader.do("go")
                self._is_right(scenario, reader, call)
                self.publish(publishers, REST)

                def reads_on() -> bool:
                    call = reader.ask("read_step", session="it", step=REST)
                    return self._is_right(scenario, reader, call)

                await_true(reads_on, f"{reader} reads on")

    def _is_right(self, scenario: Scenario, reader: Role, call: int) -> bool:
        """Say whether a call was answered; who may not be streamed to may hear of the loss."""
        error = reader.end_of(call)
        if error is None:
            return True
        assert scenario.transport != ELSE_STREAMED, error
        assert LOST & set(error.kinds), error
        return False


def first_of(way: str) -> str:
    """Return the transport that a session over a way settles on."""
    return way.partition(" ")[0].partition(",")[0]


def open_over(role: Role, way: str, **terms: object) -> str:
    """Have a student open a session over a way of ``scenarios``; return what it came to."""
    transport, _, mode = way.partition(" ")
    got = role.do("open", name="it", transport=transport, mode=mode or "cow", **terms)
    return str(got)
