"""What may leave the process that made it, and how what may not says so."""

import copy
import multiprocessing
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.conftest import SHARED_MEMORY, STREAM, Service

import teacher_logits_client as tl
from teacher_logits.errors import RequestInvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

IDS = torch.arange(40).view(4, 10)


@pytest.fixture
def queue() -> "Iterator[multiprocessing.Queue[object]]":
    """A queue as a data loader's worker has one: a thread of its own pickles what is put."""
    queue = multiprocessing.get_context("spawn").Queue()
    yield queue
    queue.close()
    queue.join_thread()


def numbers(targets: tl.Targets) -> list[object]:
    return [
        value.tolist() if isinstance(value, torch.Tensor) else value
        for value in (
            *(targets.topk_ids, targets.topk_logprobs, targets.log_tail, targets.actual_logprob),
            *(targets.valid, targets.temperature, targets.row_offsets, targets.row_firsts),
        )
    ]


@pytest.mark.parametrize("transports", [SHARED_MEMORY, STREAM], ids=lambda t: t[0].value)
@pytest.mark.parametrize(
    "way", [lambda t: t.clone(), lambda t: t.to("cpu"), lambda t: t.to(torch.device("cpu"))]
)
def test_a_copy_of_targets_outlives_the_lease_and_keeps_no_room(
    service: Service,
    transports: tuple[tl.Transport, ...],
    way: "object",
) -> None:
    with service.session(transports) as (client, session):
        with session.score(IDS, windows=[[1, 5]] * 4).result() as payload:
            copied = way(payload.targets)  # type: ignore[operator]
            shaped = way(payload.targets.rectangular())  # type: ignore[operator]
            before = numbers(payload.targets)

        assert type(copied) is tl.Targets
        assert numbers(copied) == before
        assert shaped.topk_ids.shape == (4, 5, 8)
        assert service.lease_count(client) == 0
        assert numbers(copied.rectangular().clone())[0] == shaped.topk_ids.tolist()


def test_a_copy_travels_to_another_process_as_it_is(
    service: Service, queue: "multiprocessing.Queue[object]"
) -> None:
    with service.session() as (_, session), session.score(IDS).result() as payload:
        copied = payload.targets.clone()
        queue.put(copied)

        arrived = queue.get(timeout=30)
        assert isinstance(arrived, tl.Targets)
        assert numbers(arrived) == numbers(copied)


def test_targets_of_a_lease_say_what_to_hand_on(service: Service) -> None:
    with service.session() as (_, session), session.score(IDS).result() as payload:
        for use in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(RequestInvalidError, match=r"hand on targets\.clone\(\)"):
                use(payload.targets)


def test_what_may_not_travel_is_refused_where_it_arrives_and_hangs_no_queue(
    service: Service, queue: "multiprocessing.Queue[object]"
) -> None:
    with service.session() as (client, session):
        future = session.score(IDS)
        with future.result() as payload:
            for each in (client, session, future, payload, payload.targets):
                queue.put(each)
                with pytest.raises(RequestInvalidError, match="cannot be pickled or copied"):
                    queue.get(timeout=30)
