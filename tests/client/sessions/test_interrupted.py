"""A reader that is interrupted at any moment owes nothing afterwards, and reads on.

Of the thousand moments of a score, its read and its close some are tried, and all in the slow tier.
"""

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.client.conftest import LOCAL, SHARED_MEMORY, STREAM, Service, a_profile, serve
from tests.interrupts import Interrupt

import teacher_logits_client as tl

pytestmark = pytest.mark.usefixtures("quick_collections")
IDS = torch.arange(40).view(4, 10) * 5 % 256
LONG = 30.0
MOMENTS = 1_500
"""More than there are."""
EVERY = 17


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve(tmp_path_factory.mktemp("server")) as service:
        yield service


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(range(0, MOMENTS, EVERY), id="some"),
        pytest.param(range(MOMENTS), id="all", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
@pytest.mark.parametrize("transports", [LOCAL, SHARED_MEMORY, STREAM], ids=lambda t: t[0].value)
def test_no_lease_is_left_by_who_is_interrupted(
    service: Service, transports: tuple[tl.Transport, ...], moments: range
) -> None:
    interrupted = 0
    with service.session(transports) as (client, session):
        for moment in moments:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # of what nobody was handed
                with Interrupt(moment, inside="teacher_logits_client") as interrupt:
                    read(session)
                gc.collect()
            interrupted += bool(interrupt.came_at)
            assert service.lease_count(client) == 0, interrupt.came_at
            statistics = client.statistics()
            assert (statistics.open_leases, statistics.viewed_leases) == (0, 0), interrupt.came_at
            if not interrupt.came_at:
                break
        read(session)
    assert interrupted > len(moments) / 3


def read(session: tl.Session) -> None:
    with session.score(IDS).result(timeout=LONG) as payload:
        assert payload.targets.topk_ids.shape == (40, 8)


@pytest.mark.parametrize("transports", [SHARED_MEMORY, STREAM], ids=lambda t: t[0].value)
def test_a_close_that_was_interrupted_is_done_by_the_next(
    service: Service, transports: tuple[tl.Transport, ...]
) -> None:
    with tl.connect(service.address) as client:
        for moment in range(MOMENTS):
            session = client.open_session(a_profile(transports=transports))
            with Interrupt(moment, inside="teacher_logits_client") as interrupt:
                session.close()
            session.close()
            assert client._returner.wait(LONG)
            service.await_that(lambda held: not held.sessions)  # its line ends a moment later
            assert client.statistics().open_sessions == 0, interrupt.came_at
            if not interrupt.came_at:
                break
    assert moment > 10
