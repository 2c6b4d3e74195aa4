"""Publishers that die while others wait for what they write, or read it; steps sent ahead."""

from signal import SIGKILL

import pytest
from tests.processes.faults.stage import TRANSPORTS, Stage
from tests.processes.faults.step_plays import HARM, REST, StepPlays


def test_what_is_leased_outlives_its_publisher_and_may_come_again(stage: Stage) -> None:
    plays = StepPlays(stage)
    with plays.company("shared_memory", "shared_memory") as (publishers, reader):
        late = stage.student("victim")
        plays.read_by(late, "shared_memory", "late")
        plays.publish(publishers, HARM)
        reader.do("acquire", session="it", step=HARM)
        publishers[0].signal(SIGKILL)
        publishers[0] = plays.publisher(0)
        plays.open(publishers[0], 0, "shared_memory")
        reader.do("read")
        publishers[0].do("publish", step=HARM)  # the same rows, the same bytes
        reader.do("close")
        late.do("read_step", session="it", step=HARM)
        plays.publish(publishers, REST)
        for role in (reader, late):
            role.do("read_step", session="it", step=REST)


def test_all_who_wait_for_a_dead_publisher_hear_of_it(stage: Stage) -> None:
    plays = StepPlays(stage)
    with plays.company("shared_memory", "stream") as (publishers, reader):
        others = [stage.student(name) for name in ("victim", "bystander")]
        for role, transport in zip(others, ("shared_memory", "stream"), strict=True):
            plays.read_by(role, transport, f"by-{transport}")
        publishers[0].do("publish", step=HARM)
        waiting = [(role, role.ask("read_step", session="it", step=HARM)) for role in others]
        waiting.append((reader, reader.ask("read_step", session="it", step=HARM)))
        publishers[0].signal(SIGKILL)
        for role, call in waiting:
            assert "ProducerLostError" in role.error_of(call).kinds
        publishers[0] = plays.publisher(0)
        plays.open(publishers[0], 0, "shared_memory")
        plays.publish(publishers, HARM)
        for role in (*others, reader):
            role.do("read_step", session="it", step=HARM)
        for role in others:
            role.do("end")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_was_sent_ahead_goes_back_with_its_session(stage: Stage, transport: str) -> None:
    plays = StepPlays(stage)
    with plays.company("shared_memory", transport) as (publishers, reader):
        plays.publish(publishers, HARM)
        plays.publish(publishers, REST)
        reader.do("read_step", session="it", step=HARM)
        if transport == "shared_memory":
            stage.await_leases(reader, 2)  # of the step behind it, a shard each
        reader.do("end")
        reader = stage.student("victim")
        plays.read_by(reader, transport, "next")
        reader.do("read_step", session="it", step=REST)
