"""A publisher that is interrupted at any moment loses no row and no room, and goes on.

Of the moments of a reserve, its writing, its seal and a close some are tried, and all in the slow
tier.
"""

import gc
import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tests.client.conftest import Service, serve
from tests.client.publishing.a_publisher import a_student, a_teacher, expected, some_rows
from tests.interrupts import Interrupt

import teacher_logits_client as tl
from teacher_logits.errors import PayloadInvalidError, ReservationLapsedError
from teacher_logits.pool import PAGE_BYTES

if TYPE_CHECKING:
    from teacher_logits.selection import Selection

pytestmark = pytest.mark.usefixtures("quick_collections")
LONG = 30.0
POOL_BYTES = 4 * PAGE_BYTES
"""Room of a few payloads, all of which come free again."""
MOMENTS = 5_000
"""More than there are."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("server")) as service:
        yield service


def tried(*, every: int) -> pytest.MarkDecorator:
    """The moments that a test tries: some, or all in the slow tier."""
    slow = [pytest.mark.slow, pytest.mark.timeout(900)]
    some, each = range(0, MOMENTS, every), range(MOMENTS)
    params = [pytest.param(some, id="some"), pytest.param(each, id="all", marks=slow)]
    return pytest.mark.parametrize("moments", params)


ROWS = some_rows(3)
TOP_K = cast("Selection", expected(*ROWS)).topk_ids
_names = (f"teacher-{number}" for number in itertools.count())


class Rank:
    """A publisher that writes its step, and perhaps was interrupted as it did."""

    def __init__(self, client: tl.Client, way: str) -> None:
        self.client = client
        self.teacher_id = next(_names)
        self.publisher = client.open_publisher(
            a_teacher(self.teacher_id),
            transports=(way,),
            pool_size_bytes=1 << 20,
            slab_size_bytes=1 << 18,
        )
        self.draft: tl.Draft | None = None

    def publish(self, step: int) -> None:
        ids, lengths, logits = ROWS
        self.draft = None
        self.draft = self.publisher.reserve(step, input_ids=ids, lengths=lengths, timeout=LONG)
        self.draft.select(logits)
        self.draft.seal(timeout=LONG)

    def go_on(self, step: int) -> None:
        """Do what is left of a step."""
        draft, self.draft = self.draft, None
        if draft is not None:
            try:
                draft.seal(timeout=LONG)
                return
            except (ReservationLapsedError, PayloadInvalidError):
                draft.abandon()
        del draft
        gc.collect()
        self.publish(step)


@tried(every=29)
@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_what_an_interrupt_cut_short_is_published_after_it(
    service: Service, way: str, moments: range
) -> None:
    with tl.connect(service.address) as client:
        rank = Rank(client, way)
        with client.open_session(a_student(rank.teacher_id)) as session:
            for step, moment in enumerate(moments):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ResourceWarning)  # of what nobody was handed
                    with Interrupt(moment, inside="teacher_logits_client") as interrupt:
                        rank.publish(step)
                    if interrupt.came_at:
                        rank.go_on(step)
                ids, lengths, _ = ROWS
                with session.acquire(
                    step=step, input_ids=ids, lengths=lengths, timeout=LONG
                ) as batch:
                    assert torch.equal(batch.targets.topk_ids, TOP_K), interrupt.came_at
                if not interrupt.came_at:
                    break
        service.await_that(lambda held: not held.pool.used_bytes and not held.steps)
        rank.publisher.wait_free(timeout=LONG)
        rank.publisher.close()
        service.await_that(lambda held: not held.sessions)
    assert step > 10


@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_rows_whose_abandoning_was_interrupted_may_be_reserved_again(
    service: Service, way: str
) -> None:
    ids, lengths, _ = ROWS
    with tl.connect(service.address) as client:
        rank = Rank(client, way)
        for moment in range(MOMENTS):
            draft = rank.publisher.reserve(0, input_ids=ids, lengths=lengths, timeout=LONG)
            with Interrupt(moment, inside="teacher_logits_client") as interrupt:
                draft.abandon()
            draft.abandon()
            if not interrupt.came_at:
                break
        rank.publisher.close()
    assert moment > 3


@tried(every=11)
@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_a_publisher_whose_close_was_interrupted_is_closed_by_the_next(
    service: Service, way: str, moments: range
) -> None:
    ids, lengths, _ = ROWS
    with tl.connect(service.address) as client:
        for moment in moments:
            rank = Rank(client, way)
            rank.draft = rank.publisher.reserve(0, input_ids=ids, lengths=lengths, timeout=LONG)
            with Interrupt(moment, inside="teacher_logits_client") as interrupt:
                rank.publisher.close()
            rank.publisher.close()
            assert client._returner.wait(LONG)
            service.await_that(lambda held: not held.sessions)  # its line ends a moment later
            assert client.statistics().open_sessions == 0, interrupt.came_at
            if not interrupt.came_at:
                break
    assert moment > 30
