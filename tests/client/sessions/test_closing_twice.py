"""A close that comes twice: by two threads at once, or after an interrupt of the first."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.client.conftest import LOCAL, SHARED_MEMORY, STREAM, Service, a_profile, serve
from tests.interrupts import Interrupt

import teacher_logits_client as tl
from teacher_logits.errors import TeacherLogitsError

pytestmark = pytest.mark.usefixtures("quick_collections")
IDS = torch.arange(40).view(4, 10) * 5 % 256
LONG = 30.0
TIMES = 200
WAYS = pytest.mark.parametrize(
    "transports", [LOCAL, SHARED_MEMORY, STREAM], ids=lambda t: t[0].value
)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serve(tmp_path) as service:
        yield service


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads that take turns at nearly every step of the interpreter's."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def at_once(close: Callable[[], None]) -> list[TeacherLogitsError]:
    """Close by two threads; return what was raised."""
    raised: list[TeacherLogitsError] = []
    start = threading.Barrier(2)

    def one() -> None:
        start.wait(LONG)
        try:
            close()
        except TeacherLogitsError as error:
            raised.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    return raised


@pytest.mark.usefixtures("quick_turns")
@WAYS
def test_two_threads_may_close_one_payload_and_one_session(
    service: Service, transports: tuple[tl.Transport, ...]
) -> None:
    with tl.connect(service.address) as client:
        session = client.open_session(a_profile(transports=transports))
        for _ in range(TIMES):
            assert at_once(session.score(IDS).result(timeout=LONG).close) == []
        assert service.lease_count(client) == 0
        assert at_once(session.close) == []
        service.await_that(lambda held: not held.sessions)


@WAYS
def test_room_that_is_anothers_by_then_is_no_matter_of_the_second_close(
    service: Service, transports: tuple[tl.Transport, ...]
) -> None:
    with service.session(transports) as (client, session):
        for moment in range(TIMES):
            payload = session.score(IDS).result(timeout=LONG)
            with Interrupt(moment, inside="teacher_logits_client") as interrupt:
                payload.close()
            service.lease_count(client)
            session.score(IDS).result(timeout=LONG).close()
            payload.close()
            assert service.lease_count(client) == 0, interrupt.came_at
            if not interrupt.came_at:
                break
    assert moment > 10
