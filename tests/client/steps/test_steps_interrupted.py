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

pytestmark = pytest.mark.usefixtures("quick_collections")
STEPS_A_SESSION = 100
"""As many as the slab has room for."""
MOMENTS_OF_A_CLOSE = 800
"""More than there are, most of them where the next step is opened by who closes."""


@pytest.mark.parametrize("is_opened_ahead", [False, True], ids=["lies there", "opened ahead"])
@pytest.mark.parametrize("is_another_first", [False, True], ids=["at once", "behind another"])
def test_a_step_comes_and_its_lease_goes_back_whenever_its_reader_is_interrupted(
    tmp_path: Path, is_opened_ahead: bool, is_another_first: bool
) -> None:
    moments, interrupted = count(), 0
    while True:
        with local_session(tmp_path, profile=rank(1), prefetch=0) as (session, broker):
            for step in range(0, 2 * STEPS_A_SESSION, 2):
                reader = InterruptedReader(session, broker, step, is_opened_ahead)
                if not reader.is_interrupted_at(next(moments)):
                    assert interrupted > STEPS_A_SESSION
                    return
                interrupted += 1
                if is_another_first:
                    reader.read_another()
                reader.read_again()


class InterruptedReader:
    """Acquires a step with an interrupt, and then without one."""

    def __init__(self, session: Session, broker: Broker, step: int, is_opened_ahead: bool) -> None:
        self._session = session
        self._calls = cast("StepCalls", session._calls)
        self._broker = broker
        self._step = step
        self._is_opened_ahead = is_opened_ahead
        self._lease = broker.lease(shard_of(IDS, step=step))
        self._all_back: set[str] = set()
        broker.send(a_grant(step, [self._lease], real_rows=8))

    def is_interrupted_at(self, moment: int) -> bool:
        """False where the step was there before that moment."""
        self._look_ahead()
        batch = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of a batch that nobody was handed
            with Interrupt(moment, inside="teacher_logits_client") as self._interrupt:
                batch = self._session.acquire(step=self._step, timeout=LONG)
            gc.collect()
        if batch is not None:
            batch.close()
        return batch is None

    def read_another(self) -> None:
        """Acquire the step behind it."""
        lease = self._broker.lease(shard_of(IDS, step=self._step + 1))
        self._broker.send(a_grant(self._step + 1, [lease], real_rows=8))
        self._look_ahead()
        self._session.acquire(step=self._step + 1, timeout=LONG).close()
        while lease.lease_id not in self._all_back:
            self._all_back.add(next_released(self._broker, self._interrupt))

    def read_again(self) -> None:
        """Acquire it: it comes with the lease that it has, or is asked for and has another."""
        again = replace(self._lease, lease_id=f"again-{self._step}")
        self._calls.grant(a_grant(self._step, [again], real_rows=8))
        assert self._session._returner.wait(LONG)
        before = self._released()
        with self._session.acquire(step=self._step, timeout=LONG) as batch:
            assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:])), self._came_at
        is_asked_for = not self._calls.asked.empty()
        if is_asked_for:
            self._calls.asked.get()
        assert self._session._returner.wait(LONG)
        back = self._released()
        came_with = again if is_asked_for else self._lease
        assert came_with.lease_id in back, self._came_at
        assert self._lease.lease_id in self._all_back, self._came_at
        assert came_with.lease_id not in before, self._came_at
        assert self._session._reader._out == set(), self._came_at

    def _look_ahead(self) -> None:
        if self._is_opened_ahead:
            self._session._reader.when_returned()

    @property
    def _came_at(self) -> str:
        return self._interrupt.came_at

    def _released(self) -> set[str]:
        released = set()
        while not self._broker.released.empty():
            released.add(self._broker.released.get())
        self._all_back |= released
        return released


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


def test_a_close_of_a_batch_that_was_interrupted_is_done_by_the_next(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=rank(1), prefetch=0) as (session, broker):
        for step in range(STEPS_A_SESSION):
            send(broker, step)
            batch = session.acquire(step=step, timeout=LONG)
            kept = batch.targets.topk_ids
            with Interrupt(step, inside="teacher_logits_client") as interrupt:
                batch.close()
            del kept
            batch.close()
            assert next_released(broker, interrupt) == f"l-{step}"
            assert session._returner.wait(LONG)
            if not interrupt.came_at:
                break
    assert step > 10
