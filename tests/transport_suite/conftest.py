"""One server for each module of the suite, and a student for each transport."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import pytest
from tests.fake_cuda.driver import FakeCuda
from tests.transport_suite.contents import TEMPERATURES, Content
from tests.transport_suite.ways import WAYS, Way
from tests.transport_suite.writing import Embedded, a_profile, embedded_server

import teacher_logits_client as tl

OpenSession: TypeAlias = Callable[..., AbstractContextManager[tl.Session]]

POOL_BYTES = 16 << 20


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    folder = tmp_path_factory.mktemp("suite")
    with embedded_server(folder, pool_bytes=POOL_BYTES) as server:
        yield server


@pytest.fixture
def server(running_server: Embedded) -> Iterator[Embedded]:
    """The server, in which no test leaves anything behind."""
    yield running_server
    running_server.wait_until(lambda: running_server.usage.used_bytes == 0)
    assert running_server.usage.quarantined_bytes == 0


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    """Each transport in turn."""
    found: Way = request.param
    return found


@pytest.fixture(scope="module")
def clients(
    running_server: Embedded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[tl.Client, tl.Client]]:
    """Two clients of the server; the first has a driver, by which it may pin pages."""
    address = running_server.address
    driver = FakeCuda(tmp_path_factory.mktemp("driver"))
    with tl.connect(address, device_memory=driver) as first, tl.connect(address) as second:
        yield first, second


@pytest.fixture
def open_session(server: Embedded, clients: tuple[tl.Client, tl.Client]) -> OpenSession:
    """Opens sessions over one transport and no other, for payloads such as a given one."""

    @contextmanager
    def open_it(
        way: Way,
        content: Content,
        *,
        client: tl.Client = clients[0],
        mode: tl.MapMode = tl.MapMode.COW,
        check_digest: bool = False,
    ) -> Iterator[tl.Session]:
        profile = a_profile(
            top_k=content.top_k, temperatures=TEMPERATURES[1:], transports=(way.transport,)
        )
        with client.open_session(profile, mode=mode, check_digest=check_digest) as session:
            assert session.transport is way.transport
            yield session

    return open_it
