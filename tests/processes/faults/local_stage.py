"""The stage within one process: students read the memory of a server that is theirs.

A bystander scores on throughout, over ``local`` too, and must not notice, unless it is the server
that stops.
"""

from tests.processes.faults.cast import Role, RoleError
from tests.processes.faults.local_scenarios import Fate, Plan
from tests.processes.faults.publisher import SHARDS
from tests.processes.faults.stage import Stage
from tests.processes.faults.step_plays import HARM, PEACE, REST, StepPlays
from tests.processes.faults.threads import House, HouseOracle, InjectedError
from tests.reports.raw import connect_raw

from teacher_logits.v1 import operator_service_pb2

LOCAL = "local"
STUDENTS = ("bystander", "victim", "reader")
LONG_SECONDS = 60.0


class LocalStage(Stage):
    """A house with its oracle."""

    ways = (LOCAL,)
    home = LOCAL
    cast: House
    oracle: HouseOracle

    def __init__(self, house: House) -> None:
        super().__init__(house, HouseOracle(house))

    def play_plan(self, plan: Plan) -> None:
        """Play a scenario."""
        plays = {
            "student": self._harm_one_who_scores,
            "student of steps": LocalStepPlays(self).harm_one_who_acquires,
            "server": self._stop_server,
            "server of steps": LocalStepPlays(self).stop_server,
            "room that is read": self._reclaim,
        }
        plays[plan.victim](plan)

    def start_server(self) -> None:
        """Start a server behind the threads of all roles, each of which has a client once."""
        students = [self.cast.role(name) for name in STUDENTS]
        for shard in range(SHARDS):
            self.cast.role(f"publisher {shard}", "publisher")
        self.cast.start_server()
        self.oracle.note_house()
        for role in students:
            self._visit(role, LOCAL)
        with LocalStepPlays(self).company("stream", LOCAL):
            pass
        self.oracle.note_house()

    # Students

    def _harm_one_who_scores(self, plan: Plan) -> None:
        victim = self.student("victim")
        with self.undisturbed() as bystander:
            self.enter(victim, LOCAL)
            victim.do("arm", name=plan.moment)
            call = victim.ask("cycle", session="it", step=self.step())
            victim.await_point()
            self.meet(plan, victim, call, bystander)
            if victim.is_alive:
                victim.do("cycle", session="it", step=self.step())
                victim.do("end")

    def meet(self, plan: Plan, victim: Role, call: int, bystander: Role) -> None:
        """Do it to a victim that stands at its point, once others were served."""
        self.see_progress(bystander)
        if plan.fate is Fate.DROPPED:
            victim.do("go", fate="dropped")
            victim.await_end()
            return
        victim.do("go", fate="failed" if plan.fate is Fate.FAILED else "")
        error = failure_of(victim, call)
        if error is not None:
            assert plan.fate is Fate.FAILED, error
            assert error.is_typed or InjectedError.__name__ in error.kinds, error

    # Room

    def _reclaim(self, plan: Plan) -> None:
        """Who reads room that was taken away learns of it; nobody else ever reads it wrong."""
        victim, bystander = self.student("victim"), self.student("bystander")
        self.enter(victim, LOCAL)
        self.enter(bystander, LOCAL)
        victim.do("arm", name=plan.moment)
        call = victim.ask("cycle", session="it", step=self.step())
        victim.await_point()
        [lease] = self.cast.inspect().leases
        with connect_raw(self.cast.address) as raw:
            request = operator_service_pb2.ReclaimRequest(lease_id=lease.lease_id)
            raw.operator.Reclaim(request, timeout=LONG_SECONDS)
        for number in range(3):  # the pool gives out the smallest room that will do
            bystander.do("score", session="it", step=self.step(), name=f"filler {number}")
        victim.do("go")
        error = failure_of(victim, call)
        assert error is not None, "nobody was told"
        if "WrongBytesError" in error.kinds:  # it was read, and its end has not come yet
            [name] = victim.do("holds")
            error = victim.error_of(victim.ask("close", name=name))
        assert "StalePayloadError" in error.kinds, error
        for role in (victim, bystander):
            role.do("end")

    # The server

    def _stop_server(self, plan: Plan) -> None:
        bystander, caller = self.student("bystander"), self.student("victim")
        for role in (bystander, caller):
            self.enter(role, LOCAL)
            role.do("score", session="it", step=self.step(), name="kept")
        caller.do("arm", name=plan.moment)
        call = caller.ask("cycle", session="it", step=self.step())
        caller.await_point()
        self.stop_server_under([caller, bystander])
        caller.do("go")
        caller.end_of(call)
        for role in (caller, bystander):
            role.do("read", name="kept")
            role.error_of(role.ask("cycle", session="it", step=self.step()))
            role.do("read", name="kept")
        self.come_back([caller, bystander])
        for role in (caller, bystander):
            self._visit(role, LOCAL)

    def stop_server_under(self, readers: list[Role]) -> None:
        """Stop the server, while readers hold leases."""
        self.cast.stop_server()
        for role in readers:
            assert role.is_alive

    def come_back(self, roles: list[Role]) -> None:
        """Start another server, and have all let go of the one that is no more."""
        self.cast.start_server()
        for role in roles:
            role.do("end")


class LocalStepPlays(StepPlays):
    """Plays of steps that streaming publishers write into the server's memory."""

    _stage: LocalStage

    def harm_one_who_acquires(self, plan: Plan) -> None:
        """Harm a student of steps."""
        with (
            self._stage.undisturbed() as bystander,
            self.company("stream", LOCAL) as (publishers, reader),
        ):
            victim = self._stage.student("victim")
            self.read_by(victim, LOCAL, "victim")
            victim.do("arm", name=plan.moment)
            self.publish(publishers, HARM)
            call = victim.ask("read_step", session="it", step=HARM)
            victim.await_point()
            reader.do("read_step", session="it", step=HARM)
            self._stage.meet(plan, victim, call, bystander)
            if victim.is_alive:
                victim.do("end")
            self.await_leave("victim")
            self.publish(publishers, REST)
            reader.do("read_step", session="it", step=REST)

    def stop_server(self, plan: Plan) -> None:
        """Stop the server while steps are written and read."""
        with self.company("stream", LOCAL) as (publishers, reader):
            self.publish(publishers, HARM)
            reader.do("acquire", session="it", step=PEACE + HARM, name="kept")
            self.publish(publishers, REST)
            reader.do("arm", name=plan.moment)
            call = reader.ask("read_step", session="it", step=REST)
            reader.await_point()
            self._stage.stop_server_under([reader, *publishers])
            reader.do("go")
            reader.end_of(call)
            reader.do("read", name="kept")
            for role in publishers:
                role.error_of(role.ask("publish", step=REST + 1))
            self._stage.come_back([reader, *publishers])
        with self.company("stream", LOCAL):
            pass


def failure_of(role: Role, call: int) -> RoleError | None:
    """Wait for the end of a command, and return the error that it failed with, whichever."""
    try:
        role.answer(call)
    except RoleError as error:
        return error
    return None
