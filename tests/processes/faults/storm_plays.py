"""How storms are played: two publishers, two students of one and two ranks, and one that scores.

In each round all publishers write a step and all readers read it, beside a score. Whoever is
armed comes to harm where it stands. Every call ends in its time, with the right bytes or with an
error of the tree; who read a byte that was wrong fails with another. Those who were harmed, or
told of it, come back, and in the end two steps are read in peace, without one error.
"""

import random
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from signal import SIGCONT, SIGKILL, SIGSTOP

from tests.processes.faults import publisher
from tests.processes.faults.cast import Role, RoleError
from tests.processes.faults.scenarios import Means
from tests.processes.faults.stage import SHORT_SECONDS, Stage
from tests.processes.faults.storms import PUBLISHERS, READERS, SCORER, Harm, Round, Storm
from tests.processes.faults.weather import weather
from tests.processes.faults.workers import PATIENCE_SECONDS

CALL_SECONDS = 2.0
"""The deadline of a call in a storm."""
SLACK_SECONDS = 8.0
"""What a busy machine may take on top, and what gives back what a call had."""
PEACEFUL_STEPS = 2
POOL_BYTES = 2 * publisher.POOL_BYTES
"""Room for all steps, since one that was missed by somebody is kept until the teacher goes."""
BYSTANDER = "bystander"
_RANKS = {"reader": ("solo", 0, 1), "left": ("pair", 0, 2), "right": ("pair", 1, 2)}


class StormPlay:
    """One storm on a stage."""

    def __init__(self, stage: Stage, storm: Storm) -> None:
        self._stage = stage
        self._storm = storm
        self._chance = random.Random(storm.seed)
        self._teacher = ""
        self._step = 0

    def play(self) -> None:
        """Play it, to the good end."""
        self._gather()
        for each in self._storm.rounds:
            self._play_round(each)
        for _ in range(PEACEFUL_STEPS):
            self._step += 1
            for name, call in self._ask(PATIENCE_SECONDS).items():
                self._role(name).answer(call, within=PATIENCE_SECONDS + SLACK_SECONDS)
        for role in self._roles():
            role.do("end")
            if not self._stage.oracle.knows(role):
                self._stage.oracle.note_quiet(role)  # it has had its first client
        self._stage.oracle.check()

    # Who is there

    def _role(self, name: str) -> Role:
        if name == "server":
            return self._stage.cast.server
        return self._stage.cast.role(name, "publisher" if name in PUBLISHERS else "student")

    def _roles(self) -> list[Role]:
        """Return all but the server, the bystander last."""
        return [self._role(name) for name in (*PUBLISHERS, *READERS, SCORER, BYSTANDER)]

    def _gather(self) -> None:
        """Have all come together around a new teacher, whatever was."""
        if not self._stage.cast.server.is_alive:
            self._stage.bring_server_back(self._roles())
        for role in self._roles():
            role.do("end")
        self._teacher = f"teacher-{self._stage.step()}"
        for name in (*PUBLISHERS, *READERS, SCORER, BYSTANDER):
            self._enter(name)

    def _enter(self, name: str) -> None:
        """Have somebody who has no client, or a publisher that lost its place, make one."""
        role, transport = self._role(name), self._storm.transports.get(name, "shared_memory")
        address = self._stage.cast.address
        if name in PUBLISHERS:
            shard = PUBLISHERS.index(name)
            role.do(
                "enter",
                address=address,
                teacher=self._teacher,
                shard=shard,
                transport=transport,
                pool_bytes=POOL_BYTES,
            )
            return
        role.do("connect", address=address)
        if name in READERS:
            student, rank, dp = _RANKS[name]
            role.do(
                "open",
                name="it",
                transport=transport,
                teacher=self._teacher,
                student=student,
                rank=rank,
                dp=dp,
            )
        else:
            role.do("open", name="it", transport=transport)

    # A round

    def _play_round(self, round_: Round) -> None:
        self._step += 1
        cast = {name: self._role(name) for name in (*PUBLISHERS, *READERS, SCORER, "server")}
        for harm in round_.harms:
            cast[harm.victim].do("arm", name=harm.moment)
        with weather(self._stage.cast, round_.weather, self._chance):
            calls = self._ask(CALL_SECONDS)
            self._harm([(harm, cast[harm.victim]) for harm in round_.harms], cast, calls)
            errors = {name: _end(cast[name], call) for name, call in calls.items()}
        for harm in round_.harms:
            if cast[harm.victim].is_alive:
                cast[harm.victim].do("arm", name="")
                cast[harm.victim].do("go")  # who came there after all calls had ended
        self._recover(cast, errors)

    def _ask(self, seconds: float) -> dict[str, int]:
        """Have all do what they are there for; return their calls by name."""
        asked: dict[str, tuple[str, dict[str, object]]] = {
            name: ("publish", {"step": self._step}) for name in PUBLISHERS
        }
        asked |= {name: ("read_step", {"session": "it", "step": self._step}) for name in READERS}
        asked[SCORER] = ("cycle", {"session": "it", "step": self._stage.step()})
        return {
            name: self._role(name).ask(command, timeout=seconds, **arguments)
            for name, (command, arguments) in asked.items()
        }

    def _harm(
        self, harms: list[tuple[Harm, Role]], cast: Mapping[str, Role], calls: Mapping[str, int]
    ) -> None:
        """Do to each what is to be done once it stands, until no call goes on any more."""
        until = time.monotonic() + PATIENCE_SECONDS
        while harms:
            for harm, role in list(harms):
                if role.stands():
                    harms.remove((harm, role))
                    self._strike(role, harm.means)
            going = [
                cast[name]
                for name, call in calls.items()
                if cast[name].is_alive and not cast[name].has_said(call)
            ]
            if not going:
                return
            assert time.monotonic() < until, f"{going} neither answer nor stand"
            wait([role.pipe for role in {*going, *(role for _, role in harms)}], SHORT_SECONDS)

    def _strike(self, victim: Role, means: Means) -> None:
        """Do it. While the victim is stopped somebody else calls, who may get no answer."""
        if means is not Means.KILL:
            victim.signal(SIGSTOP)
            bystander = self._role(BYSTANDER)
            call = bystander.ask(
                "glance", session="it", step=self._stage.step(), timeout=SHORT_SECONDS
            )
            bystander.end_of(call, within=SHORT_SECONDS + SLACK_SECONDS)
        if means is Means.STOP_AND_GO_ON:
            victim.signal(SIGCONT)
            victim.do("go")
        else:
            victim.signal(SIGKILL)

    def _recover(self, cast: Mapping[str, Role], errors: Mapping[str, RoleError | None]) -> None:
        """Have those come back who were harmed, or told of it; where that fails, all anew."""
        harmed = [name for name in errors if errors[name] or not cast[name].is_alive]
        if not cast["server"].is_alive:
            self._gather()
            return
        try:
            for name in harmed:
                if name in PUBLISHERS:
                    self._enter(name)
                    self._role(name).do("publish", step=self._step, timeout=CALL_SECONDS)
            for name in harmed:
                if name not in PUBLISHERS:
                    self._role(name).do("end")
                    self._enter(name)
        except RoleError as error:
            if not error.is_typed:
                raise
            self._gather()


def _end(role: Role, call: int) -> RoleError | None:
    """Wait for the end of a call; None where it was answered, or nobody is left to say."""
    if not role.is_alive:
        return None
    return role.end_of(call, within=CALL_SECONDS + SLACK_SECONDS)
