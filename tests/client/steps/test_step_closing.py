"""How long a batch stays good, and what goes back when."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tests.client.losses.shards import shards_of
from tests.client.steps.step_rig import IDS, rank, ready
from tests.client.steps.step_servers import (
    LONG,
    WRITER,
    a_grant,
    local_session,
)

import teacher_logits_client as tl
from teacher_logits.errors import (
    AlignmentError,
    LeaseLostError,
    PayloadInvalidError,
    StalePayloadError,
)

if TYPE_CHECKING:
    from teacher_logits_client.steps.line_steps import LineSteps


class TestClosing:
    def test_empties_all_that_was_made_and_returns_every_lease(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            leases = ready(broker, shards_of(IDS, (5, 3)))
            with session.acquire(step=7) as batch:
                columns, micro = batch.columns, list(batch.micro_batches())
                made = [batch.targets, *(each.targets for each in micro)]
                raw = [each.columns["topk_ids"].clone() for each in micro]
            del raw

            for use in (
                lambda: made[0].topk_logprobs,
                lambda: made[1].topk_ids,
                lambda: made[2].entropy,
                lambda: batch.targets,
                lambda: list(batch.micro_batches()),
                lambda: columns["topk_ids"],
                lambda: micro[0].targets,
                lambda: micro[1].columns["topk_ids"],
                lambda: made[0].rectangular(),
                batch.__enter__,
            ):
                with pytest.raises(LeaseLostError, match="batch of step 7 is closed"):
                    use()
            returned = {broker.released.get(timeout=LONG) for _ in leases}
            assert returned == {lease.lease_id for lease in leases}
            batch.close()

    def test_names_views_that_outlive_it_once_and_keeps_their_room(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            leases = ready(broker, shards_of(IDS, (6, 2)))
            batch = session.acquire(step=7)
            first, second = batch.micro_batches()
            view = first.columns["topk_ids"][1:]
            expected_ids, _ = view.clone(), second.columns["log_tail"]
            del first, second, _
            with pytest.warns(ResourceWarning, match="step 7 .* over topk_ids are alive") as told:
                batch.close()

            assert len(told) == 1
            assert broker.released.get(timeout=LONG) == leases[1].lease_id
            assert torch.equal(view, expected_ids)
            del view
            assert broker.released.get(timeout=LONG) == leases[0].lease_id

    def test_finds_bytes_that_were_overwritten_and_returns_the_rest_all_the_same(
        self, tmp_path: Path
    ) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            leases = ready(broker, shards_of(IDS, (6, 2)))
            with pytest.raises(StalePayloadError, match="p-7-0"):
                with session.acquire(step=7):
                    broker.overwrite(leases[0])

            assert {broker.released.get(timeout=LONG) for _ in leases} == {"l-0", "l-1"}

    def test_bytes_that_were_overwritten_before_they_were_looked_at_are_not_the_teachers_fault(
        self, tmp_path: Path
    ) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            leases = ready(broker, shards_of(IDS, (6, 2)))
            cast("LineSteps", session._steps._source).look_ahead()
            broker.spoil(leases[0])
            with pytest.raises(StalePayloadError, match="p-7-0") as caught:
                session.acquire(step=7, input_ids=IDS[4:])

            assert isinstance(caught.value.__context__, (PayloadInvalidError, AlignmentError))
            assert {broker.released.get(timeout=LONG) for _ in leases} == {"l-0", "l-1"}

    def test_a_batch_that_is_dropped_is_named_once_and_returned(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            leases = ready(broker, shards_of(IDS, (6, 2)))
            batch = session.acquire(step=7)
            with pytest.warns(ResourceWarning, match="step 7 was dropped") as told:
                del batch

            assert len(told) == 1
            assert {broker.released.get(timeout=LONG) for _ in leases} == {"l-0", "l-1"}

    def test_a_lease_that_cannot_be_opened_gives_all_back(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            shards = shards_of(IDS, (6, 2))
            leases = [broker.lease(each) for each in shards]
            broker.overwrite(leases[1])
            broker.send(a_grant(7, leases, real_rows=8))
            with pytest.raises(StalePayloadError):
                session.acquire(step=7)

            assert {broker.released.get(timeout=LONG) for _ in leases} == {"l-0", "l-1"}

    def test_steps_that_were_never_asked_for_are_not_returned_one_by_one(
        self, tmp_path: Path
    ) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            for step in (7, 8):
                ready(broker, shards_of(IDS, (8,), step=step), step=step)
            with session.acquire(step=7):
                pass
            session.close()

            assert broker.released.get(timeout=LONG) == "l-0"
            assert broker.released.empty()

    def test_after_an_error_nothing_is_warned_about(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            ready(broker, shards_of(IDS, (8,)))
            batch = session.acquire(step=7)
            view = batch.columns["topk_ids"]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                batch.__exit__(ValueError, ValueError("of the user's"), None)
            del view

    def test_the_writers_that_came_later_are_among_the_transports(self, tmp_path: Path) -> None:
        with local_session(tmp_path, profile=rank(1)) as (session, broker):
            assert session.transports == {}
            ready(broker, shards_of(IDS, (8,)))
            with session.acquire(step=7) as batch:
                assert session.transports == {WRITER: tl.Transport.SHARED_MEMORY}
                assert batch.transports == {"p-7-0": tl.Transport.SHARED_MEMORY}
