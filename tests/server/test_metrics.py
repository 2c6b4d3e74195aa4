"""What Prometheus scrapes: a real server, its page, and the table of names behind it."""

from __future__ import annotations

import io
import json
import re
import select
import socket
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.client.publishing.a_publisher import a_teacher

import teacher_logits_client as tl
from teacher_logits.addresses import Address, read_address
from teacher_logits.errors import ConfigError, SessionRefusedError, TeacherLogitsError
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.v1 import registry_service_pb2 as registry_messages
from teacher_logits.v1 import teacher_logits_service_pb2 as student_messages
from teacher_logits.v1.registry_service_pb2_grpc import RegistryServiceStub
from teacher_logits.v1.teacher_logits_service_pb2_grpc import TeacherLogitsServiceStub
from teacher_logits.wire import student_to_wire, teacher_to_wire
from teacher_logits_client.testing import ToyTeacher
from teacher_logits_server import logs
from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.metrics.names import LABELS, METRICS
from teacher_logits_server.metrics.page import MOST_SCRAPES, MetricsPage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_server.engines import Engine

PATIENCE = 30.0
DOCS = Path(__file__).parents[2] / "docs" / "observability.md"
OWN = "teacher_logits_"
LOOPBACK = Address(host="127.0.0.1", port=0)


class Watched:
    """A server, and its page."""

    def __init__(self, address: str, page: str) -> None:
        self.address = address
        self.page = page

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """All samples, by name and labels."""
        with urlopen(f"http://{self.page}/metrics", timeout=PATIENCE) as answer:
            text = answer.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 where it is not there yet."""
        return self.samples().get((f"{OWN}{name}", frozenset(labels.items())), 0.0)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    socket_path = tmp_path_factory.mktemp("s") / "s"
    config = ServerConfig(
        listen=(f"unix:{socket_path}",), metrics="127.0.0.1:0", pool_size_bytes=1 << 24
    )
    engine = cast("Engine", ToyTeacher())
    with serve_in_thread(config, engine) as server:
        yield Watched(server.address, server.readiness.metrics)


def profile(**given: object) -> tl.StudentProfile:
    grid = tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
    settings: dict[str, object] = {"batch_grid": grid, "top_k": 4, **given}
    return tl.StudentProfile(**settings)  # type: ignore[arg-type]


ROWS = torch.arange(12).reshape(2, 6)


def test_the_page_shows_a_session_its_lease_and_its_room(watched: Watched) -> None:
    with tl.connect(watched.address) as client, client.open_session(profile()) as session:
        settled = session.transport
        assert settled is not None
        transport = settled.value
        granted = watched.value("leases_granted_total", transport=transport)
        with session.score(ROWS).result(timeout=PATIENCE):
            shown = watched.samples()

            def value(name: str, **labels: str) -> float:
                return shown[f"{OWN}{name}", frozenset(labels.items())]

            assert value("sessions", role="student", transport=transport, state="alive") == 1
            assert value("leases", state="held") == 1
            assert value("leased_bytes", state="held") == 4096
            assert value("pool_bytes", pool="host", state="used") == 4096
            assert value("pool_bytes", pool="host", state="free") == (1 << 24) - 4096
            assert value("leases_granted_total", transport=transport) == granted + 1
            assert value("serving") == 1


def test_what_the_teacher_does_is_measured(watched: Watched) -> None:
    tokens = watched.value("scored_tokens_total", teacher="teacher")
    fills = watched.value("batch_fill_ratio_count", teacher="teacher")
    passes = watched.value("pass_seconds_count", teacher="teacher")
    with tl.connect(watched.address) as client, client.open_session(profile()) as session:
        with session.score(ROWS).result(timeout=PATIENCE):
            pass
        assert watched.value("scored_tokens_total", teacher="teacher") == tokens + 12
        assert watched.value("batch_fill_ratio_count", teacher="teacher") == fills + 1
        assert watched.value("pass_seconds_count", teacher="teacher") == passes + 1
        assert watched.value("rpcs_total", method="ScoringService/Score", code="OK") >= 1


def test_streamed_bytes_are_counted(watched: Watched) -> None:
    before = watched.value("streamed_bytes_total")
    streaming = profile(transports=(tl.Transport.STREAM,))
    with (
        tl.connect(watched.address) as client,
        client.open_session(streaming) as session,
        session.score(ROWS).result(timeout=PATIENCE) as payload,
    ):
        assert payload.targets is not None
        assert watched.value("granted_bytes_total", transport="stream") > 0
        assert watched.value("streamed_bytes_total") > before
        assert watched.value("streams") == 0


def test_a_refusal_is_counted_by_its_reason_its_rules_and_its_class(watched: Watched) -> None:
    reason = {"surface": "rpc", "reason": "SESSION_REFUSED"}
    before = watched.value("refusals_total", **reason)
    rule = watched.value("broken_rules_total", rule="top_k_too_large")
    with tl.connect(watched.address) as client, pytest.raises(SessionRefusedError):
        client.open_session(profile(top_k=1 << 20))
    assert watched.value("refusals_total", **reason) == before + 1
    assert watched.value("broken_rules_total", rule="top_k_too_large") == rule + 1


def test_every_metric_is_in_the_table_and_every_label_has_a_closed_list(watched: Watched) -> None:
    by_name = {each.name: each for each in METRICS}
    for name, labels in watched.samples():
        if not name.startswith(OWN):
            assert name.startswith(("process_", "python_info"))
            continue
        stem = re.sub("_(bucket|count|sum)$", "", name)
        metric = by_name[name] if name in by_name else by_name[stem]
        assert {label for label, _ in labels} - {"le"} == set(metric.labels)
    assert {label for each in METRICS for label in each.labels} == set(LABELS)


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and labels of each metric, as the page of the documentation has them."""
    rows = re.findall(r"^\| `(teacher_logits_\w+)` \| (\w+) \| (.*?) \|", DOCS.read_text(), re.M)
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_the_documentation_lists_every_metric_and_no_other() -> None:
    assert documented() == {each.name: (each.kind, each.labels) for each in METRICS}


def test_names_say_their_kind_and_their_unit() -> None:
    for each in METRICS:
        assert each.name.endswith("_total") == (each.kind == "counter"), each.name
        if not each.name.endswith("_timestamp_seconds"):  # a moment, and no span
            is_measured = each.name.endswith(("_seconds", "_ratio"))
            assert is_measured == (each.kind == "histogram"), each.name


def test_ids_of_clients_never_make_a_series(watched: Watched) -> None:
    def meet(number: int) -> None:
        teacher = profile(teacher_id=f"teacher-of-nobody-{number}")
        with tl.connect(watched.address) as client:
            with client.open_session(profile(student_id=f"student-{number}")) as session:
                session.score(ROWS).result(timeout=PATIENCE).close()
            with pytest.raises(TeacherLogitsError):
                client.open_session(teacher, timeout=0.2)
        with grpc.insecure_channel(watched.address) as channel:
            stub: grpc.UnaryUnaryMultiCallable[bytes, bytes]
            for method in (f"/teacher_logits.v1.ScoringService/M{number}", f"/no.S{number}/M"):
                stub = channel.unary_unary(method)
                with pytest.raises(grpc.RpcError):
                    stub(b"", timeout=PATIENCE)

    def series() -> set[object]:
        # A session that closes is there for a moment: its state may have no row, or one.
        return {key for key in watched.samples() if key[0] != f"{OWN}sessions"}

    meet(0)
    before = series()
    for number in range(1, 4):
        meet(number)
    assert series() == before
    values = {value for _, labels in watched.samples() for _, value in labels}
    assert not [value for value in values if re.search("nobody|student-|no.S|/M", value)]


def test_a_change_of_state_is_logged_once_and_a_flood_of_refusals_few_times(
    watched: Watched,
) -> None:
    stream = io.StringIO()
    handler = logs.configure(format="json", level="info", stream=stream)
    try:
        with tl.connect(watched.address) as client:
            with client.open_session(profile(student_id="flooder")) as session:
                session_id = session.terms.session_id
                for _ in range(40):
                    with pytest.raises(SessionRefusedError):
                        client.open_session(profile(top_k=1 << 20))
    finally:
        logs.unconfigure(handler)
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [e["event"] for e in entries].count("session refused") == logs.MOST_ALIKE
    of_it = [e["event"] for e in entries if e.get("session_id") == session_id]
    assert of_it[:3] == ["session opened", "session settled", "session closed"]
    assert len(of_it) == len(set(of_it))


def test_calls_that_are_repeated_or_name_nobody_s_session_are_not_logged(watched: Watched) -> None:
    stream = io.StringIO()
    opening = student_messages.OpenSessionRequest(
        request_id="again", protocol_version=PROTOCOL_VERSION, profile=student_to_wire(profile())
    )
    publishing = registry_messages.OpenPublisherRequest(
        request_id="also",
        protocol_version=PROTOCOL_VERSION,
        profile=teacher_to_wire(a_teacher("told")),
    )
    handler = logs.configure(format="json", level="info", stream=stream)
    try:
        with grpc.insecure_channel(watched.address) as channel:
            students, registry = TeacherLogitsServiceStub(channel), RegistryServiceStub(channel)
            for _ in range(2):
                session = students.OpenSession(opening, timeout=PATIENCE).session
                publisher = registry.OpenPublisher(publishing, timeout=PATIENCE).session
            for each in (session, publisher):
                for _ in range(2):
                    prove = student_messages.ProveLocalityRequest(session_id=each.session_id)
                    students.ProveLocality(prove, timeout=PATIENCE)
                for session_id in (each.session_id, each.session_id, each.session_id + "x"):
                    close = student_messages.CloseSessionRequest(session_id=session_id)
                    students.CloseSession(close, timeout=PATIENCE)
    finally:
        logs.unconfigure(handler)
    entries = [json.loads(line) for line in stream.getvalue().splitlines()]
    for who, each in (("session", session), ("publisher", publisher)):
        told = [e["event"] for e in entries if e.get("session_id", "").startswith(each.session_id)]
        assert told == [f"{who} {what}" for what in ("opened", "settled", "closed")]


def test_a_scraper_that_asks_for_a_version_that_is_none_gets_the_plain_page(
    watched: Watched,
) -> None:
    wanted = {"Accept": "application/openmetrics-text;version=x"}
    request = Request(f"http://{watched.page}/metrics", headers=wanted)
    with urlopen(request, timeout=PATIENCE) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")


def test_there_is_no_other_page(watched: Watched) -> None:
    for path in ("/", "/metric", "/metrics/x"):
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://{watched.page}{path}", timeout=PATIENCE)


@contextmanager
def page(*, most_seconds: float = PATIENCE) -> Iterator[MetricsPage]:
    page = MetricsPage(CollectorRegistry(), LOOPBACK, most_seconds=most_seconds)
    try:
        yield page
    finally:
        page.stop()


def to(page: MetricsPage) -> socket.socket:
    connection = socket.create_connection((page.address.host, page.address.port), PATIENCE)
    connection.settimeout(PATIENCE)
    return connection


def is_cut_off(connection: socket.socket) -> bool:
    """Wait for the end of a connection."""
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def test_a_scraper_that_asks_for_nothing_or_drips_is_cut_off() -> None:
    with page(most_seconds=0.1) as served, to(served) as silent, to(served) as dripping:
        give_up = time.monotonic() + PATIENCE
        with suppress(ConnectionResetError, BrokenPipeError):
            while not select.select([dripping], [], [], 0.02)[0]:
                dripping.send(b"G")  # each in time, and the whole never
                assert time.monotonic() < give_up
        assert is_cut_off(dripping)
        assert is_cut_off(silent)


def test_one_scraper_too_many_is_turned_away_and_a_page_with_some_stops() -> None:
    with page() as served:
        open_ones = [to(served) for _ in range(MOST_SCRAPES)]
        with to(served) as late:
            assert is_cut_off(late)
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        for each in open_ones:
            assert is_cut_off(each)
            each.close()
        stopping.join(PATIENCE)
        assert not stopping.is_alive()


def test_an_address_in_use_is_refused_with_the_flag() -> None:
    with page() as served, pytest.raises(ConfigError, match="--metrics") as refused:
        MetricsPage(CollectorRegistry(), served.address)
    assert refused.value.facts["flag"] == "--metrics"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("unix:/run/metrics", "HTTP"),
        ("0.0.0.0:9464", "other hosts"),
        ("nonsense", "address"),
    ],
)
def test_an_address_that_is_none_for_a_page_is_refused(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServerConfig(metrics=address)


def test_a_page_has_an_address_of_its_own() -> None:
    with pytest.raises(ConfigError, match="--listen"):
        ServerConfig(metrics="127.0.0.1:7001", listen=("127.0.0.1:7001",), insecure=True)


def test_other_hosts_may_scrape_where_that_is_said() -> None:
    config = ServerConfig(metrics="0.0.0.0:9464", insecure_metrics=True)
    assert config.metrics == "0.0.0.0:9464"
    assert read_address("0.0.0.0:9464", what="--metrics").port == 9464


def test_calls_without_tls_do_not_open_the_page_nor_the_page_such_calls() -> None:
    with pytest.raises(ConfigError, match=r"--metrics .*--insecure-metrics"):
        ServerConfig(metrics="0.0.0.0:9464", listen=("0.0.0.0:7001",), insecure=True)
    with pytest.raises(ConfigError, match=r"--listen .*say --insecure if"):
        ServerConfig(metrics="0.0.0.0:9464", listen=("0.0.0.0:7001",), insecure_metrics=True)


def test_to_open_a_page_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--insecure-metrics .*there is none"):
        ServerConfig(insecure_metrics=True)
