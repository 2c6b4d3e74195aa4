"""Announced steps: open before they are sealed, and handed out when their slots say so."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tests.client.losses.shards import Shard, shard_of, shards_of, some_ids
from tests.client.steps.step_rig import expected
from tests.client.steps.step_servers import LONG, SOON, Broker, a_grant, a_profile, local_session

from teacher_logits.errors import DeadlinePassedError, PayloadInvalidError, SlabOpenError
from teacher_logits.layout import ColumnKind, RowStatus
from teacher_logits.payload import Extent
from teacher_logits.tensors import column_tensors
from teacher_logits.terms import LeaseTerms, StepGrant, StepWithdrawn
from teacher_logits_client.config import MapMode
from teacher_logits_client.line.file_watch import FileWatch
from teacher_logits_client.steps.grants import OpenedGrant
from teacher_logits_client.steps.mailbox import Mailbox

if TYPE_CHECKING:
    from teacher_logits_client.steps.line_steps import LineSteps
    from teacher_logits_client.student import Session

IDS = some_ids(8)
RANK_1 = a_profile(data_parallel_rank=1)
EXTENT = Extent(slab_id="slab-1", offset_bytes=0, size_bytes=4096, slot=0, generation=2)


class Announced:
    """A step whose shards have their places, and are not sealed."""

    def __init__(self, broker: Broker, shards: Sequence[Shard], *, mine: int = -1) -> None:
        """Place ``shards``; the reader is leased the one with the number ``mine``, or all."""
        self._slab = broker.slab
        self.all = [broker.lease(each) for each in shards]
        for lease in self.all:
            self._mark(lease, -1)
        leases = self.all if mine < 0 else [self.all[mine]]
        extents = tuple(lease.extent for lease in self.all if lease.extent is not None)
        step = shards[0].payload.key.step if shards[0].payload.key else 0
        self.grant: StepGrant = replace(a_grant(step, leases, real_rows=8), awaited=extents)
        broker.send(self.grant)

    def seal(self, number: int = 0) -> None:
        extent = self.all[number].extent
        assert extent is not None
        self._slab.let_in(extent.slot, extent.generation)

    def touch(self) -> None:
        self._slab.touch()

    def write(self, data: bytes, number: int = 0) -> None:
        extent = self.all[number].extent
        assert extent is not None
        self._slab.room(extent)[: len(data)] = data

    def _mark(self, lease: LeaseTerms, by: int) -> None:
        assert lease.extent is not None
        self._slab.mark(lease.extent.slot, lease.extent.generation + by)


def source_of(session: "Session") -> "LineSteps":
    return cast("LineSteps", session._steps._source)


def open_ahead(session: "Session", step: int = 7, *, lease_id: str = "") -> OpenedGrant:
    """Have a step opened that was announced, or that with a lease of this id.

    Another thread may be at it, or at the line. An acquisition that ends before a step is open
    gives it up instead, and these brokers grant nothing anew.
    """
    source = source_of(session)
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        source.look_ahead()
        opened = source._mailbox._steps.get(step)
        if isinstance(opened, OpenedGrant):
            if not lease_id or lease_id in {each.lease_id for each in opened.grant.leases}:
                return opened
        os.sched_yield()
    raise AssertionError(f"step {step} was not opened")


def await_opened(session: "Session", lease_id: str) -> None:
    """Wait until the lease of the announced step 7 is open, by another thread."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        opened = source_of(session)._mailbox._steps.get(7)
        if isinstance(opened, OpenedGrant) and opened.grant.leases[0].lease_id == lease_id:
            return
        os.sched_yield()
    raise AssertionError(f"{lease_id} was not opened")


def test_who_waits_is_handed_a_step_by_its_seal_and_nothing_is_sent(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker), ThreadPoolExecutor() as pool:
        step = Announced(broker, [shard_of(IDS)])
        waiting = pool.submit(session.acquire, step=7, input_ids=IDS[4:], timeout=LONG)
        broker.wanted.get(timeout=LONG)
        step.seal()
        with waiting.result(LONG) as batch:
            assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))


def test_who_is_roused_ahead_of_a_seal_waits_on_for_it(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        step = Announced(broker, [shard_of(IDS)])
        open_ahead(session)
        for _ in range(2):
            step.touch()
            with pytest.raises(DeadlinePassedError):
                session.acquire(step=7, input_ids=IDS[4:], timeout=SOON)
        step.touch()
        step.seal()
        with session.acquire(step=7, input_ids=IDS[4:], timeout=LONG) as batch:
            assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))


def test_what_is_written_after_it_was_opened_is_what_is_read(tmp_path: Path) -> None:
    shard = shard_of(IDS)
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        step = Announced(broker, [shard])
        scores = column_tensors(bytearray(shard.data), shard.payload.columns)
        untouched = bytearray(shard.data)
        column_tensors(untouched, shard.payload.columns)[ColumnKind.TOPK_IDS].fill_(-1)
        step.write(bytes(untouched))
        opened = open_ahead(session)
        step.write(shard.data)
        step.seal()
        with session.acquire(step=7) as batch:
            assert batch is opened.batch
            start = sum(map(len, IDS[:4]))
            assert torch.equal(batch.columns["topk_ids"], scores[ColumnKind.TOPK_IDS][start:])


def test_a_step_is_handed_out_when_every_shard_is_sealed_whoever_reads_them(
    tmp_path: Path,
) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        step = Announced(broker, shards_of(IDS, (4, 4)), mine=1)
        open_ahead(session)
        step.seal(1)
        with pytest.raises(DeadlinePassedError, match="step 7"):
            session.acquire(step=7, timeout=SOON)
        step.seal(0)
        with session.acquire(step=7, input_ids=IDS[4:], timeout=LONG) as batch:
            assert batch.rows == range(4, 8)


def test_a_step_that_is_withdrawn_is_waited_for_anew(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        Announced(broker, [shard_of(some_ids(8, seed=1))])
        open_ahead(session)
        broker.send(StepWithdrawn(step=7))
        second = Announced(broker, [shard_of(IDS)])
        open_ahead(session, lease_id="l-1")
        with pytest.raises(DeadlinePassedError, match="step 7"):
            session.acquire(step=7, timeout=SOON)
        second.seal()
        with session.acquire(step=7, input_ids=IDS[4:], timeout=LONG) as batch:
            assert batch.step == 7
        assert broker.released.get(timeout=LONG) == "l-1"
        assert session._returner.wait(LONG)
        assert session._reader._out == set()


def test_who_waits_lets_go_of_what_is_withdrawn_meanwhile(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker), ThreadPoolExecutor() as pool:
        mailbox = source_of(session)._mailbox
        waiting = pool.submit(session.acquire, step=7, input_ids=IDS[4:], timeout=LONG)
        for number in range(5):
            step = Announced(broker, [shard_of(IDS)])
            await_opened(session, f"l-{number}")
            assert mailbox._withdrawn == []
            assert session._reader._out == {f"l-{number}"}
            if number < 4:
                broker.send(StepWithdrawn(step=7))
        step.seal()
        with waiting.result(LONG) as batch:
            assert batch.step == 7


def test_two_that_let_go_of_what_is_withdrawn_have_it_once() -> None:
    mailbox = Mailbox()
    sealed = replace(a_grant(7, [], real_rows=8), awaited=(EXTENT,))
    for _ in range(50):
        mailbox.put(grant := replace(sealed))
        assert mailbox.put_opened(OpenedGrant(grant=grant))
        mailbox.put(StepWithdrawn(step=7))
    with ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(mailbox.take_withdrawn) for _ in range(20)]
        assert sum(len(each.result(LONG)) for each in taken) == 50


def test_a_step_that_is_withdrawn_comes_when_it_is_granted(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker), ThreadPoolExecutor() as pool:
        Announced(broker, [shard_of(some_ids(8, seed=1))])
        waiting = pool.submit(session.acquire, step=7, input_ids=IDS[4:], timeout=LONG)
        broker.wanted.get(timeout=LONG)
        broker.send(StepWithdrawn(step=7), a_grant(7, [broker.lease(shard_of(IDS))], real_rows=8))
        with waiting.result(LONG) as batch:
            assert batch.step == 7


def test_the_rows_that_a_seal_masks_are_named(tmp_path: Path) -> None:
    shard = shard_of(IDS)
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        step = Announced(broker, [shard])
        open_ahead(session)
        masked = bytearray(shard.data)
        column_tensors(masked, shard.payload.columns)[ColumnKind.ROW_STATUS][5] = RowStatus.NAN
        step.write(bytes(masked))
        step.seal()
        with session.acquire(step=7) as batch:
            assert batch.checks[0].detail == "1 of 4 rows are masked"


def test_rows_that_were_moved_behind_their_announcement_are_refused(tmp_path: Path) -> None:
    shard = shard_of(IDS)
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        step = Announced(broker, [shard])
        open_ahead(session)
        moved = bytearray(shard.data)
        column_tensors(moved, shard.payload.columns)[ColumnKind.ROW_OFFSETS][4] += 1
        step.write(bytes(moved))
        step.seal()
        with pytest.raises(PayloadInvalidError, match="when it was announced"):
            session.acquire(step=7)
        assert broker.released.get(timeout=LONG) == "l-0"
        assert broker.unread == ["l-0"]


def test_a_step_whose_seal_cannot_be_seen_is_given_back_unread_and_wanted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(watch: FileWatch, fd: int) -> int:
        raise SlabOpenError("no more watches")

    monkeypatch.setattr(FileWatch, "add", refuse)
    with local_session(tmp_path, profile=RANK_1) as (session, broker), ThreadPoolExecutor() as pool:
        Announced(broker, [shard_of(IDS)])
        waiting = pool.submit(session.acquire, step=7, input_ids=IDS[4:], timeout=LONG)
        assert broker.wanted.get(timeout=LONG) == (7, 2)
        assert broker.released.get(timeout=LONG) == "l-0"
        assert broker.unread == ["l-0"]
        assert broker.wanted.get(timeout=LONG) == (7, 2)
        broker.send(a_grant(7, [broker.lease(shard_of(IDS))], real_rows=8))
        with waiting.result(LONG) as batch:
            assert batch.step == 7


def test_who_copies_does_so_when_it_is_sealed(tmp_path: Path) -> None:
    shard = shard_of(IDS)
    with local_session(tmp_path, profile=RANK_1, mode=MapMode.COPY) as (session, broker):
        step = Announced(broker, [shard])
        step.write(bytes(len(shard.data)))
        assert open_ahead(session).leases is None
        step.write(shard.data)
        step.seal()
        with session.acquire(step=7, input_ids=IDS[4:]) as batch:
            step.write(bytes(len(shard.data)))
            assert torch.equal(batch.columns["topk_ids"], expected(IDS[4:]))


def test_a_session_that_closes_gives_back_what_it_was_told_of(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        Announced(broker, [shard_of(IDS)])
        open_ahead(session)
        session.close()
        assert broker.released.get(timeout=LONG) == "l-0"
        assert broker.unread == ["l-0"]
        assert session._reader._out == set()


def test_a_session_that_closes_gives_back_nothing_that_another_thread_takes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        step = Announced(broker, [shard_of(IDS)])
        open_ahead(session)
        step.seal()
        mailbox = source_of(session)._mailbox
        announced, taken = mailbox.announced, []

        def and_take() -> list[StepGrant]:
            found = announced()
            taken.append(mailbox.take_opened(7))
            return found

        monkeypatch.setattr(mailbox, "announced", and_take)
        session.close()
        assert taken == [None]
        assert broker.released.get(timeout=LONG) == "l-0"


def test_a_slab_that_is_gone_is_watched_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[int] = []
    monkeypatch.setattr(FileWatch, "remove", lambda watch, number: removed.append(number))
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        step = Announced(broker, [shard_of(IDS)])
        open_ahead(session)
        step.seal()
        with session.acquire(step=7):
            session._reader.forget_slabs(["slab-1"])
            assert removed == []
        assert session._returner.wait(LONG)
        assert removed == [1]
