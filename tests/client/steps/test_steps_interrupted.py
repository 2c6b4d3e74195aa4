"""What is on its way to a student survives an interrupt at any moment of the thread that acquires.

Each moment at which the interpreter lets a signal's handler run is tried, one after the other.
"""

import gc
import queue
import warnings
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tests.client.losses.shards import shard_of
from tests.client.steps.step_rig import IDS, expected, rank
from tests.client.steps.step_servers import LONG, Broker, a_grant, local_session
from tests.interrupts import Interrupt

from teacher_logits_client.student import Session

if TYPE_CHECKING:
    from tests.client.steps.step_calls import StepCalls

STEPS_A_SESSION = 100
"""As many as the slab has room for."""
MOMENTS_OF_A_CLOSE = 800
"""More than there are, most of them where the next step is opened by who closes."""


@pytest.mark.parametrize("is_opened_ahead", [False, True])
def test_a_step_comes_and_its_lease_goes_back_whenever_its_reader_is_interrupted(
    tmp_path: Path, is_opened_ahead: bool
) -> None:
    moments, interrupted = count(), 0
    while True:
        with local_session(tmp_path, profile=rank(1), prefetch=0) as (session, broker):
            for step in range(STEPS_A_SESSION):
                if not was_interrupted(session, broker, step, next(moments), is_opened_ahead):
                    assert interrupted > STEPS_A_SESSION
                    return
                interrupted += 1


def was_interrupted(
    session: Session, broker: Broker, step: int, moment: int, is_opened_ahead: bool
) -> bool:
    """Acquire a step with an interrupt, then without; False where it ended before that moment."""
    lease = broker.lease(shard_of(IDS, step=step))
    broker.send(a_grant(step, [lease], real_rows=8))
    if is_opened_ahead:
        session._reader.when_returned()
    batch = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of a batch that nobody was handed
        with Interrupt(moment, inside="teacher_logits_client") as interrupt:
            batch = session.acquire(step=step, timeout=LONG)
        gc.collect()
    if batch is not None:
        batch.close()
        return False
    # Where the interrupt was the last that happened to the step, it is asked for again.
    calls = cast("StepCalls", session._calls)
    calls.grant(a_grant(step, [replace(lease, lease_id=f"again-{step}")], real_rows=8))
    with session.acquire(step=step, timeout=LONG) as batch:
        assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:])), interrupt.came_at
    was_asked_again = not calls.asked.empty()
    back = {next_released(broker, interrupt)}
    if was_asked_again:
        calls.asked.get()
        back.add(next_released(broker, interrupt))
    assert session._returner.wait(LONG)
    while not broker.released.empty():  # a lease may be given back twice
        back.add(broker.released.get())
    owed = {lease.lease_id, f"again-{step}"} if was_asked_again else {lease.lease_id}
    assert back == owed, interrupt.came_at
    assert session._reader._out == set(), interrupt.came_at
    return True


def test_the_next_step_comes_whenever_the_close_of_one_is_interrupted(tmp_path: Path) -> None:
    interrupted = 0
    for first in range(0, MOMENTS_OF_A_CLOSE, STEPS_A_SESSION):
        with local_session(tmp_path, profile=rank(1), prefetch=1) as (session, broker):
            send(broker, 0)
            for step in range(STEPS_A_SESSION):
                batch = session.acquire(step=step, timeout=LONG)
                send(broker, step + 1)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ResourceWarning)
                    with Interrupt(first + step, inside="teacher_logits_client") as interrupt:
                        batch.close()
                    del batch
                    gc.collect()
                interrupted += bool(interrupt.came_at)
                assert next_released(broker, interrupt) == f"l-{step}"
                assert session._returner.wait(LONG)
    assert interrupted > MOMENTS_OF_A_CLOSE / 2


def next_released(broker: Broker, interrupt: Interrupt) -> str:
    try:
        return broker.released.get(timeout=LONG)
    except queue.Empty:
        pytest.fail(f"a lease did not come back after an interrupt at {interrupt.came_at}")


def send(broker: Broker, step: int) -> None:
    broker.send(a_grant(step, [broker.lease(shard_of(IDS, step=step))], real_rows=8))
