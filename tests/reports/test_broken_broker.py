"""A fallback is never silent (T52): the broker's socket, or a session's line to it, is broken.

A session that shares memory lives by its line, and goes on where only the socket's name went: what
it has is still shared. One whose line was cut has ended, and says so to every call; it is never
turned into one that streams. The next handshake settles what is to be had by then, and shows it in
the session, the payload, the server's log, its view and its metrics.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.processes.running import PATIENCE_SECONDS
from tests.reports.raw import connect_raw
from tests.transport_suite.writing import a_profile

import teacher_logits_client as tl
from teacher_logits.errors import SessionExpiredError, SessionRefusedError
from teacher_logits.transport import RefusalReason, Settlement
from teacher_logits.wire.views import server_view_from_wire

ROWS = [[3, 1, 4, 1, 5], [9, 2, 6]]
MANY_ROWS = [[number % 250, 7, 1] * 300 for number in range(4)]
WANTED = (tl.Transport.SHARED_MEMORY, tl.Transport.STREAM)


@dataclass(frozen=True)
class Place:
    """A server, and its broker's socket."""

    server: tl.testing.ServerProcess
    broker: Path

    @contextmanager
    def without_broker(self) -> Iterator[None]:
        """Have the socket's name gone for the block, as where a folder was cleaned up."""
        aside = self.broker.with_name("aside")
        self.broker.rename(aside)
        try:
            yield
        finally:
            aside.rename(self.broker)

    def settlements(self, session: tl.Session) -> tuple[Settlement, ...]:
        """How the server says that a session's payloads come."""
        with connect_raw(self.server.address) as raw:
            sessions = server_view_from_wire(raw.inspect()).sessions
        (ours,) = [each for each in sessions if each.session_id == session.terms.session_id]
        return tuple(ours.settlements)

    def unsettled(self) -> float:
        """How often, by its metric, a session settled without memory for want of the broker."""
        page = f"http://{self.server.readiness['metrics']}/metrics"
        with urlopen(page, timeout=PATIENCE_SECONDS) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return sum(
            each.value
            for family in families
            for each in family.samples
            if each.name == "teacher_logits_transport_refusals_total"
            and each.labels == {"transport": "shared_memory", "reason": "BROKER_UNREACHABLE"}
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    broker = tmp_path_factory.mktemp("broker") / "b"
    with tl.testing.serve(
        pool_size="16MiB", slab_size="1MiB", broker=broker, metrics="127.0.0.1:0"
    ) as server:
        yield Place(server, broker)


@pytest.fixture
def client(place: Place) -> Iterator[tl.Client]:
    with tl.connect(place.server.address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


def profile(locality: tl.Locality = tl.Locality.PREFER) -> tl.StudentProfile:
    return a_profile(top_k=64, transports=WANTED, locality=locality)


def cut_lines(broker: Path) -> int:
    """Cut every line of this process, as a kernel would; return how many there were."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            end = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or the descriptor of the listing itself
            continue
        with end:
            if end.family == socket.AF_UNIX and end.type == socket.SOCK_SEQPACKET:
                if end.getpeername() == str(broker):
                    end.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def test_t52_what_is_shared_stays_shared_where_only_the_sockets_name_went(
    place: Place, client: tl.Client
) -> None:
    """Payloads in slabs that come only now are asked for over the line, which is there."""
    with client.open_session(profile()) as session, place.without_broker():
        for rows in (ROWS, MANY_ROWS, MANY_ROWS):
            with session.score(rows).result() as leased:
                assert leased.transport is tl.Transport.SHARED_MEMORY
    assert client.statistics().fallbacks == 0


def test_t52_the_next_session_streams_where_it_may_and_everybody_says_so(
    place: Place, client: tl.Client
) -> None:
    before = place.unsettled()
    with place.without_broker(), client.open_session(profile()) as session:
        assert place.unsettled() == before + 1
        assert session.transport is tl.Transport.STREAM
        (refusal,) = session.refusals
        assert refusal.reason is RefusalReason.BROKER_UNREACHABLE
        with session.score(ROWS).result() as leased:
            assert leased.transport is tl.Transport.STREAM
        (settled,) = place.settlements(session)
        assert settled.transport is tl.Transport.STREAM
        assert [each.reason for each in settled.refusals] == [RefusalReason.BROKER_UNREACHABLE]
    (line,) = [
        line
        for line in place.server.log_text().splitlines()
        if "session settled" in line and session.terms.session_id in line
    ]
    assert "transport=stream" in line
    assert "BROKER_UNREACHABLE" in line
    assert client.statistics().streamed_bytes > 0


def test_t52_the_next_session_is_refused_where_it_insists(place: Place, client: tl.Client) -> None:
    with place.without_broker(), pytest.raises(SessionRefusedError, match="BROKER_UNREACHABLE"):
        client.open_session(profile(tl.Locality.REQUIRE))


@pytest.mark.parametrize("locality", [tl.Locality.PREFER, tl.Locality.REQUIRE])
def test_t52_a_session_whose_line_was_cut_has_ended_and_streams_nothing(
    place: Place, client: tl.Client, locality: tl.Locality
) -> None:
    with client.open_session(profile(locality)) as session:
        session.score(ROWS).result().close()
        under_way = session.score(MANY_ROWS)
        assert cut_lines(place.broker) >= 1  # one of the test before may be on its way out
        with pytest.raises(SessionExpiredError, match="open a new"):
            under_way.result()
        with pytest.raises(SessionExpiredError, match="open a new"):
            session.score(ROWS)
    assert client.statistics().streamed_bytes == 0
    with client.open_session(profile(locality)) as again, again.score(ROWS).result() as leased:
        assert leased.transport is tl.Transport.SHARED_MEMORY


def test_t52_after_a_cut_the_next_get_streams_or_fails_by_the_mode(
    place: Place, client: tl.Client
) -> None:
    with client.open_session(profile()) as session, place.without_broker():
        cut_lines(place.broker)
        with pytest.raises(SessionExpiredError):
            session.score(ROWS)
        with client.open_session(profile()) as again, again.score(ROWS).result() as leased:
            assert leased.transport is tl.Transport.STREAM
        with pytest.raises(SessionRefusedError):
            client.open_session(profile(tl.Locality.REQUIRE))
