"""Traces: one of them from a trainer's step through the server to the engine."""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import pytest
import torch
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collecting
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import teacher_logits_client as tl
from teacher_logits import tracing
from teacher_logits.errors import ConfigError, TeacherLogitsError
from teacher_logits_client import testing
from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.proto.trace.v1.trace_pb2 import Span
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult

    from teacher_logits_server.engines import Engine

PATIENCE = 30.0
PAGE = Path(__file__).parents[2] / "docs" / "observability.md"
ROWS = torch.arange(12).reshape(2, 6)


class Collector(collector.TraceServiceServicer):
    """A collector that keeps what it is sent."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._came = threading.Condition()

    def Export(
        self, request: collecting.ExportTraceServiceRequest, context: object
    ) -> collecting.ExportTraceServiceResponse:
        with self._came:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans.extend(scope.spans)
            self._came.notify_all()
        return collecting.ExportTraceServiceResponse()

    def names(self) -> set[str]:
        """The names of all spans that came."""
        with self._came:
            return {each.name for each in self._spans}

    def of_trace(self, trace_id: int, until: Callable[[set[str]], bool]) -> dict[str, Span]:
        """The spans of a trace, by name, once their names are as wanted."""
        wanted = trace_id.to_bytes(16, "big")

        def spans() -> dict[str, Span]:
            return {each.name: each for each in self._spans if each.trace_id == wanted}

        with self._came:
            assert self._came.wait_for(lambda: until(set(spans())), PATIENCE), set(spans())
            return spans()


@contextmanager
def a_collector() -> Iterator[tuple[Collector, str]]:
    """A collector, and where it is."""
    collects = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    collector.add_TraceServiceServicer_to_server(collects, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collects, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


@contextmanager
def collecting_server() -> Iterator[tuple[Collector, str]]:
    """A collector, and the address of a server process that sends its spans there."""
    with a_collector() as (collects, endpoint), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with testing.serve(pool_size="16MiB", otlp_endpoint=endpoint) as served:
            yield collects, served.address


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in this process, which has the spans of both sides then."""
    path = tmp_path_factory.mktemp("s") / "s"
    config = ServerConfig(listen=(f"unix:{path}",), pool_size_bytes=1 << 24, reflection=True)
    with serve_in_thread(config, cast("Engine", testing.ToyTeacher())) as server:
        yield server.address


class Spans(InMemorySpanExporter):
    """Spans that have ended, in any thread, and can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._came = threading.Condition()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._came:
            result = super().export(spans)
            self._came.notify_all()
        return result

    def of_trace(self, trace_id: int, *names: str) -> dict[str, ReadableSpan]:
        """The spans of a trace, by name, once these are among them."""

        def found() -> dict[str, ReadableSpan]:
            return {
                each.name: each
                for each in self.get_finished_spans()
                if (context := each.get_span_context()) and context.trace_id == trace_id
            }

        with self._came:
            assert self._came.wait_for(lambda: {*names} <= {*found()}, PATIENCE), {*found()}
            return found()


@pytest.fixture
def own_spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """The spans of this process."""
    spans = Spans()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return spans


def profile(*, transports: tuple[tl.Transport, ...] | None = None) -> tl.StudentProfile:
    grid = tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
    plain = tl.StudentProfile(batch_grid=grid, top_k=4)
    return plain if transports is None else replace(plain, transports=transports)


@contextmanager
def step() -> Iterator[int]:
    """A trainer's step, as its own span; yields the id of the trace."""
    with trace.get_tracer("trainer").start_as_current_span("step") as span:
        yield span.get_span_context().trace_id


RPC = "teacher_logits.v1.ScoringService/Score"
CHAIN = ("step", "teacher-logits/score", RPC, "teacher-logits/batch", "teacher-logits/engine_pass")


def test_one_trace_joins_the_trainers_step_the_server_and_the_engine(
    address: str, own_spans: Spans
) -> None:
    with tl.connect(address) as client, client.open_session(profile()) as session:
        with step() as trace_id, session.score(ROWS).result(timeout=PATIENCE):
            pass
    spans = own_spans.of_trace(trace_id, *CHAIN)
    for above, below in pairwise(CHAIN):
        parent, context = spans[below].parent, spans[above].get_span_context()
        assert parent is not None
        assert context is not None
        assert parent.span_id == context.span_id, below


def test_the_provider_that_the_page_shows_sends_the_trainers_spans(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = re.findall(r"```python\n(from opentelemetry.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    setting = partial(monkeypatch.setattr, trace, "_TRACER_PROVIDER")
    monkeypatch.setattr(trace, "set_tracer_provider", setting)  # it can be set once otherwise
    with (
        a_collector() as (collects, endpoint),
        tl.connect(address) as client,
        client.open_session(profile()) as session,
    ):
        size = session.terms.vocabulary_size
        names = {"tl": tl, "session": session, "input_ids": ROWS}
        names["student"] = torch.nn.Embedding(size, size)
        exec(snippet.replace("http://collector:4317", endpoint), names)
        assert set(CHAIN) <= collects.names()


@pytest.mark.slow
def test_a_trace_joins_two_processes(own_spans: Spans) -> None:
    with (
        collecting_server() as (collects, address),
        tl.connect(address) as client,
        client.open_session(profile()) as session,
    ):
        with step() as trace_id, session.score(ROWS).result(timeout=PATIENCE):
            pass
        served = collects.of_trace(trace_id, set(CHAIN[2:]).issubset)
    context = own_spans.of_trace(trace_id, "teacher-logits/score")[CHAIN[1]].get_span_context()
    assert context is not None
    assert served[RPC].parent_span_id == context.span_id.to_bytes(8, "big")
    assert served["teacher-logits/batch"].parent_span_id == served[RPC].span_id


def test_a_payload_over_a_line_is_of_the_trace_too(address: str, own_spans: Spans) -> None:
    apart = profile(transports=(tl.Transport.SHARED_MEMORY,))
    with tl.connect(address) as client, client.open_session(apart) as session:
        with session.score(ROWS).result(timeout=PATIENCE) as payload, step() as trace_id:
            with session.acquire(payload_id=payload.payload.payload_id):
                pass
    own_spans.of_trace(trace_id, "step", "teacher-logits/acquire", "line/acquire")


def test_what_a_publisher_writes_is_of_the_trace_of_its_step(
    address: str, own_spans: Spans
) -> None:
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1)
    teacher = tl.TeacherProfile(
        teacher_id="published",
        batch_grid=grid,
        vocabulary_size=64,
        head_rows=64,
        top_k=4,
        max_row_tokens=6,
    )
    logits = torch.randn(2, 6, 64)
    with tl.connect(address) as client, client.open_publisher(teacher) as publisher:
        with step() as trace_id, publisher.reserve(step=0, input_ids=ROWS) as draft:
            tl.select_top_k(logits, out=draft)
    own = ("teacher-logits/reserve", "teacher-logits/seal")
    spans = own_spans.of_trace(trace_id, *own, "line/reserve", "line/seal")
    for name in own:
        assert spans[name].attributes == {"teacher_logits.step": 0}


def test_what_fails_is_named_and_its_text_is_not(own_spans: Spans) -> None:
    with pytest.raises(TeacherLogitsError), tracing.span("seal", {"step": 3}):
        raise TeacherLogitsError("a secret")
    (span,) = own_spans.get_finished_spans()
    assert (span.name, span.status.description) == ("teacher-logits/seal", "TeacherLogitsError")
    assert span.attributes == {"teacher_logits.step": 3}
    assert not span.events


def test_a_batch_of_several_traces_is_tied_to_each(own_spans: Spans) -> None:
    calls = [tracing.begin("score"), tracing.begin("score")]
    first, second = (each for each in calls if each is not None)
    batch = tracing.start("batch", {"requests": 2}, above=[first, second])
    assert batch is not None
    for each in (batch, first, second):
        each.end()
    batched, _, linked = own_spans.get_finished_spans()
    assert batched.parent is not None
    assert batched.parent.span_id == first.get_span_context().span_id
    (link,) = batched.links
    assert link.context.trace_id == second.get_span_context().trace_id
    (back,) = linked.links
    assert back.context.span_id == batch.get_span_context().span_id


@pytest.mark.parametrize("sent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_what_is_no_trace_context_begins_a_trace(sent: str, own_spans: Spans) -> None:
    with tracing.serving("rpc", (("traceparent", sent), ("traceparent-bin", b"\xff"))):
        pass
    (span,) = own_spans.get_finished_spans()
    assert span.parent is None


def test_without_a_provider_nothing_is_made_sent_or_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    assert not tracing.is_on()  # the API is there, and no provider
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    with tracing.span("acquire"), tracing.serving("rpc", ()):
        assert tracing.current() is None
        assert tracing.outgoing() is None
        assert tracing.traceparent() == ""
        assert tracing.begin("score") is None
    assert "opentelemetry" not in sys.modules


def test_a_collector_needs_a_scheme_and_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from teacher_logits_server.traces import exported

    with pytest.raises(ConfigError, match="https://"):
        ServerConfig(otlp_endpoint="collector:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"teacher-logits\[otel\]"), exported("http://c:4317"):
        pass


def test_reflection_names_the_services(address: str) -> None:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    with grpc.insecure_channel(address) as channel:
        named = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {"teacher_logits.v1.ScoringService", "grpc.health.v1.Health"} <= named


def test_reflection_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from teacher_logits_server.services.reflecting import reflect

    monkeypatch.setitem(sys.modules, "grpc_reflection.v1alpha", None)
    with pytest.raises(ConfigError, match=r"teacher-logits\[reflection\]"):
        reflect(None, ())  # type: ignore[arg-type]
