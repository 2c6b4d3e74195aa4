"""A server to be tried, which after every test must serve as before and hold nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.reports.raw import Raw, connect_raw
from tests.reports.teachers import TriedTeacher
from tests.transport_suite.right import RAGGED, assert_right
from tests.transport_suite.writing import Embedded, a_profile, embedded_server

import teacher_logits_client as tl

POOL_BYTES = 4 << 20
FINGERPRINT = "f" * 32


@dataclass(frozen=True)
class Tried:
    """The server with its teacher, plain stubs and a client of ours."""

    server: Embedded
    teacher: TriedTeacher
    raw: Raw
    client: tl.Client

    def assert_serves(self) -> None:
        """A request is answered rightly, and then the server holds nothing."""
        with self.client.open_session(a_profile(top_k=8)) as session:
            with session.score(RAGGED).result() as leased:
                assert_right(leased, RAGGED)
        server = self.server
        server.wait_until(lambda: server.usage.used_bytes == 0)
        seen = self.raw.inspect()
        assert (seen.pool.used_bytes, seen.pool.quarantined_bytes) == (0, 0)
        assert (seen.queue.waiting_requests, seen.queue.running_requests) == (0, 0)
        assert len(seen.leases) == 0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    teacher = TriedTeacher(tokenizer_fingerprint=FINGERPRINT)
    folder = tmp_path_factory.mktemp("reports")
    with (
        embedded_server(folder, pool_bytes=POOL_BYTES, engine=teacher) as server,
        connect_raw(server.address) as raw,
        tl.connect(server.address) as client,
    ):
        yield Tried(server, teacher, raw, client)


@pytest.fixture
def tried(running: Tried) -> Iterator[Tried]:
    yield running
    running.teacher.gate.set()
    running.teacher.is_spoilt = False
    running.assert_serves()
