"""Steps that were sent ahead and never acquired."""

import pytest
from tests.processes.faults.stage import TRANSPORTS, Stage
from tests.processes.faults.step_plays import HARM, REST, StepPlays


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
