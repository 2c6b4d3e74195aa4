"""Steps that lie ahead: read, opened and kept apart from those that are asked for."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from tests.client.losses.shards import shard_of, shards_of, some_ids
from tests.client.steps.step_servers import (
    LONG,
    SOON,
    a_grant,
    a_profile,
    local_session,
)

from teacher_logits.errors import (
    DeadlinePassedError,
    LeaseLostError,
    PayloadInvalidError,
    StalePayloadError,
)
from teacher_logits.layout import ColumnKind
from teacher_logits.tensors import column_tensors
from teacher_logits.terms import Verdict
from teacher_logits_client.openers import View
from teacher_logits_client.openers.host_payload import HostPayload
from teacher_logits_client.payloads.columns import LeasedColumns
from teacher_logits_client.payloads.row_columns import Part
from teacher_logits_client.steps.grants import OpenedGrant
from teacher_logits_client.targets.leased_targets import Made

if TYPE_CHECKING:
    from teacher_logits_client.steps.line_steps import LineSteps
    from teacher_logits_client.student import Session

IDS = some_ids(8)
RANK_1 = a_profile(data_parallel_rank=1)


def look_ahead(session: "Session") -> "LineSteps":
    source = cast("LineSteps", session._steps._source)
    source.look_ahead()
    return source


def test_what_was_opened_ahead_is_handed_out_as_it_is(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        leases = [broker.lease(each) for each in shards_of(IDS, (6, 2))]
        broker.send(a_grant(7, leases, real_rows=8))
        source = look_ahead(session)
        opened = source._mailbox._steps[7]
        assert isinstance(opened, OpenedGrant)
        assert opened.leases is not None
        broker.deaf.set()
        with session.acquire(step=7, input_ids=IDS[4:]) as batch:
            assert batch is opened.batch
            assert batch._payloads[0]._opened is opened.leases[0].memory
            broker.deaf.clear()
        returned = {broker.released.get(timeout=LONG) for _ in leases}
        assert returned == {"l-0", "l-1"}


def test_returns_look_ahead_by_themselves(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        for step in (7, 8):
            lease = broker.lease(shard_of(IDS, step=step))
            broker.send(a_grant(step, [lease], real_rows=8))
        with session.acquire(step=7):
            pass
        assert session._returner.wait(LONG)

        source = cast("LineSteps", session._steps._source)
        assert [opened.grant.step for opened in source._mailbox.take_all_opened()] == [8]


def test_a_batch_that_is_closed_has_the_next_one_made(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        broker.send(a_grant(7, [broker.lease(shard_of(IDS))], real_rows=8))
        batch = session.acquire(step=7)
        broker.send(a_grant(8, [broker.lease(shard_of(IDS, step=8))], real_rows=8))
        returns_may_go_on = threading.Event()
        session._returner.later(returns_may_go_on.wait)  # type: ignore[arg-type]
        batch.close()
        opened = cast("LineSteps", session._steps._source)._mailbox._steps[8]
        returns_may_go_on.set()

        assert isinstance(opened, OpenedGrant)
        with session.acquire(step=8) as batch:
            assert batch is opened.batch


def test_a_batch_that_was_made_ahead_is_compared_with_the_rows_that_are_given(
    tmp_path: Path,
) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        broker.send(a_grant(7, [broker.lease(shard_of(IDS))], real_rows=8))
        look_ahead(session)
        with session.acquire(step=7, input_ids=IDS[4:]) as batch:
            verdicts = {check.name: check.verdict for check in batch.checks}
            assert verdicts["row_digests"] is Verdict.PASSED


def test_tensors_that_were_made_ahead_count_as_views_that_outlive_a_lease(
    tmp_path: Path,
) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        broker.send(a_grant(7, [broker.lease(shard_of(IDS))], real_rows=8))
        look_ahead(session)
        batch = session.acquire(step=7)
        ids = batch.columns["topk_ids"]
        with pytest.warns(ResourceWarning, match="topk_ids"):
            batch.close()
        assert session._returner.wait(LONG)
        assert broker.released.empty()
        del ids
        assert broker.released.get(timeout=LONG) == "l-0"


def test_what_was_opened_ahead_and_never_taken_goes_back_unread(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        lease = broker.lease(shard_of(IDS))
        broker.send(a_grant(7, [lease], real_rows=8))
        source = look_ahead(session)
        assert session._reader._out == {"l-0"}
        session.close()

        assert source._mailbox.take_all_opened() == []
        assert session._reader._out == set()
        assert session._reader.line is not None
        assert session._reader.line.has_ended
        assert broker.released.empty()


def test_what_could_not_be_opened_ahead_is_told_to_who_asks_and_given_back_then(
    tmp_path: Path,
) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        lease = broker.lease(shard_of(IDS))
        broker.overwrite(lease)
        broker.send(a_grant(7, [lease], real_rows=8))
        look_ahead(session)
        assert session._returner.wait(LONG)
        assert broker.released.empty()
        with pytest.raises(StalePayloadError):
            session.acquire(step=7)

        assert broker.released.get(timeout=LONG) == "l-0"


def test_a_step_whose_slab_is_late_stays_for_the_next_who_asks(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        broker.deaf.set()
        broker.send(a_grant(7, [broker.lease(shard_of(IDS))], real_rows=8))
        with pytest.raises(DeadlinePassedError, match="slab-1"):
            session.acquire(step=7, timeout=SOON)
        assert session._returner.wait(LONG)
        assert broker.released.empty()
        broker.deaf.clear()
        with session.acquire(step=7, timeout=LONG) as batch:
            assert batch.step == 7
        assert broker.released.get(timeout=LONG) == "l-0"


def test_threads_that_wait_for_different_steps_are_all_served(tmp_path: Path) -> None:
    with (
        local_session(tmp_path, profile=RANK_1, prefetch=0) as (session, broker),
        ThreadPoolExecutor() as threads,
    ):
        first = threads.submit(session.acquire, step=9, timeout=LONG)
        assert broker.wanted.get(timeout=LONG) == (9, 1)
        second = threads.submit(session.acquire, step=7, timeout=LONG)
        assert broker.wanted.get(timeout=LONG) == (7, 3)
        for step in (7, 9):
            lease = broker.lease(shard_of(IDS, step=step))
            broker.send(a_grant(step, [lease], real_rows=8))

        for waiting, step in ((first, 9), (second, 7)):
            with waiting.result(LONG) as batch:
                assert batch.step == step


def test_rows_whose_publisher_gave_no_ids_are_unchecked(tmp_path: Path) -> None:
    with local_session(tmp_path, profile=RANK_1) as (session, broker):
        shard = shard_of(IDS)
        data = bytearray(shard.data)
        digests = column_tensors(data, shard.payload.columns)[ColumnKind.ROW_DIGESTS]
        digests[5:] = 0
        lease = broker.lease(type(shard)(payload=shard.payload, data=bytes(data), positions=()))
        broker.send(a_grant(7, [lease], real_rows=8))
        with session.acquire(step=7, input_ids=IDS[4:]) as batch:
            _, digest_check, lookup = batch.checks
            assert digest_check.verdict is Verdict.UNCHECKED
            assert digest_check.detail.startswith("1 of 4 rows")
            assert lookup.verdict is Verdict.PASSED


def test_row_offsets_that_leave_the_payload_are_refused() -> None:
    shard = shard_of(IDS)
    data = bytearray(shard.data)
    column_tensors(data, shard.payload.columns)[ColumnKind.ROW_OFFSETS][5] = 1 << 40
    made = Made(what="it", again="it", facts={})
    columns = LeasedColumns(shard.payload, HostPayload(memoryview(data)), made, watch=None)
    with pytest.raises(PayloadInvalidError, match="row_offsets put rows 2 to 4"):
        Part(shard.payload, columns, first=2, row_count=3)


def test_a_column_is_made_when_it_is_asked_for_and_not_after_the_end() -> None:
    shard = shard_of(IDS)
    made = Made(what="lease 5 of payload 7", again="the payload", facts={})
    watched: list[str] = []

    def watch(name: str, view: View) -> None:
        watched.append(name)  # and say that the lease is gone

    memory = HostPayload(memoryview(shard.data))
    columns = LeasedColumns(shard.payload, memory, made, watch=watch)
    assert len(columns) == 9
    assert watched == []
    with pytest.raises(LeaseLostError, match="lease 5 of payload 7 is closed"):
        columns[ColumnKind.TOPK_IDS]
    assert watched == ["topk_ids"]
