"""The scorer between sessions: one that asks for much, or keeps much, leaves others their part."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.server.test_scorer import PATIENCE, Service, running

from teacher_logits.errors import LimitReachedError, PoolFullError
from teacher_logits_server.config import ServerConfig

if TYPE_CHECKING:
    from concurrent.futures import Future

    from teacher_logits.terms import LeaseTerms

PAGE = 4096
ONE_PAGE = [[1, 2, 3]]
TWO_PAGES = [list(range(1, 41))]


def held_up(service: Service, session_id: str) -> Future[LeaseTerms]:
    """Have the teacher at work on a session's request, and stay there."""
    service.teacher.gate.clear()
    first = service.scorer.submit(service.job(session_id, ONE_PAGE))
    assert service.teacher.entered.acquire(timeout=PATIENCE)
    return first


def test_beside_a_thousand_requests_of_one_session_another_s_is_in_the_next_pass() -> None:
    with running(Service(max_batch_tokens=4, pool_size_bytes=1 << 21)) as service:
        hog, guest = service.session(), service.session()
        first, refused = held_up(service, hog), list[object]()
        for _ in range(1000):
            try:
                service.scorer.submit(service.job(hog, ONE_PAGE))
            except LimitReachedError as error:
                refused.append(error.facts["limit_name"])
        waiting = service.scorer.submit(service.job(guest, [[7, 8, 9]]))

        service.teacher.gate.set()

        waiting.result(PATIENCE)
        first.result(PATIENCE)
        assert refused == ["session_requests"] * (1001 - ServerConfig().max_session_requests)
        assert [[7, 8, 9]] in service.teacher.passes[:3]


def test_who_keeps_all_that_it_may_leaves_the_rest_of_the_pool_to_others() -> None:
    with running(Service(pool_size_bytes=8 * PAGE, slab_size_bytes=8 * PAGE)) as service:
        hog, guest = service.session(), service.session()
        for _ in range(3):
            service.scorer.submit(service.job(hog, TWO_PAGES)).result(PATIENCE)
        deadline = service.clock.now() + 5
        fourth = service.scorer.submit(service.job(hog, TWO_PAGES, deadline=deadline))
        assert service.slabs.was_full.wait(PATIENCE)

        service.scorer.submit(service.job(guest, TWO_PAGES)).result(PATIENCE)

        assert not fourth.done()
        service.clock.advance(6)
        service.scorer.submit(service.job(guest, ONE_PAGE))  # wakes the thread
        with pytest.raises(PoolFullError, match="--max-session-share") as told:
            fourth.result(PATIENCE)
        assert told.value.facts["limit"] == 6 * PAGE
        assert told.value.retry_after == timedelta(seconds=1)


def test_who_is_left_alone_may_have_all_of_it() -> None:
    with running(Service(pool_size_bytes=8 * PAGE, slab_size_bytes=8 * PAGE)) as service:
        hog, guest = service.session(), service.session()
        for _ in range(3):
            service.scorer.submit(service.job(hog, TWO_PAGES)).result(PATIENCE)
        fourth = service.scorer.submit(service.job(hog, TWO_PAGES))
        assert service.slabs.was_full.wait(PATIENCE)

        service.ledger.close_session(guest)

        fourth.result(PATIENCE)


def test_room_that_comes_free_is_for_who_has_less_of_it() -> None:
    with running(Service(pool_size_bytes=8 * PAGE, slab_size_bytes=8 * PAGE)) as service:
        hog = service.session()
        kept = [
            service.scorer.submit(service.job(hog, TWO_PAGES)).result(PATIENCE) for _ in range(4)
        ]
        more = service.scorer.submit(service.job(hog, TWO_PAGES))
        assert service.slabs.was_full.wait(PATIENCE)
        guest = service.session()
        service.slabs.was_full.clear()
        waiting = service.scorer.submit(service.job(guest, TWO_PAGES))
        assert service.slabs.was_full.wait(PATIENCE)

        service.ledger.release(hog, kept[0].lease_id)

        waiting.result(PATIENCE)
        assert not more.done()
