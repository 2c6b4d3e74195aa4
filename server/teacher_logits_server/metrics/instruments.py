"""Instruments: the one registry of a server, and what its parts count in.

A registry of the server's own, so that two servers in one process do not count together. What the
tables hold is not counted here: a scrape reads it off them (``held``). Safe on any thread.
"""

from __future__ import annotations

from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from teacher_logits_server.metrics import names
from teacher_logits_server.metrics.refusals import Refusals
from teacher_logits_server.metrics.samples import samples_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Counter, Histogram

    from teacher_logits.transport import Settlement
    from teacher_logits.views import MetricView


HEALTH = "/grpc.health.v1.Health/"
_PACKAGE = "teacher_logits.v1."


class Instruments:
    """What the parts of one server count in; ``registry`` is what a scrape reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.refusals = Refusals(self.registry)
        self.rpcs = RpcTimes(self.registry)
        self._waits = names.WAIT_SECONDS.histogram(self.registry)
        self._streamed = names.STREAMED_BYTES.counter(self.registry)
        self._unsettled = names.TRANSPORT_REFUSALS.counter(self.registry)
        self._queued = names.QUEUED_SECONDS.histogram(self.registry)
        self._passes = names.PASS_SECONDS.histogram(self.registry)
        self._fill = names.BATCH_FILL.histogram(self.registry)
        self._padding = names.PADDING.counter(self.registry)
        self.streams = names.STREAMS.gauge(self.registry)

    def samples(self) -> tuple[MetricView, ...]:
        """Return what a scrape would read, as an inspection tells it."""
        return samples_of(self.registry)

    def show_end(self, look: Callable[[], float]) -> None:
        """Show when the server's certificate ends, as ``look`` says at each scrape."""
        names.CERTIFICATE_ENDS.gauge(self.registry).set_function(look)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Measure what a call waits for ``what``, one of the values of the label ``for``."""
        since = perf_counter()
        try:
            yield
        finally:
            self._waits.labels(what).observe(perf_counter() - since)

    def streamed(self, size_bytes: int) -> None:
        """Count the bytes of a chunk."""
        self._streamed.inc(size_bytes)

    def settled(self, settlements: Iterable[Settlement]) -> None:
        """Count the transports that a session wanted and settled without."""
        for settlement in settlements:
            for refusal in settlement.refusals:
                self._unsettled.labels(refusal.transport.value, refusal.reason.value).inc()

    def passes_of(self, teacher: str) -> PassTimes:
        """Return what the scorer of one of the server's own teachers measures in."""
        return PassTimes(
            queued=self._queued.labels(teacher),
            took=self._passes.labels(teacher),
            fill=self._fill.labels(teacher),
            padding=self._padding.labels(teacher),
        )


class RpcTimes:
    """What RPCs take and end in; health is left out: a watch lasts as long as its caller likes."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._seconds = names.RPC_SECONDS.histogram(registry)
        self._ended = names.RPCS.counter(registry)
        self._open = names.RPCS_OPEN.gauge(registry)
        #: Looked up once: finding a series costs more than counting in it.
        self._series: dict[tuple[str, str], tuple[Histogram, Counter]] = {}

    def begin(self, method: str) -> float:
        """Note that one begins; returns when, for ``end``."""
        if not method.startswith(HEALTH):
            self._open.inc()
        return perf_counter()

    def end(self, method: str, code: str, began: float) -> None:
        """Note that one has ended. ``method`` is one that this server has."""
        if method.startswith(HEALTH):
            return
        self._open.dec()
        series = self._series.get((method, code))
        if series is None:
            name = method.removeprefix("/").removeprefix(_PACKAGE)
            series = self._seconds.labels(name), self._ended.labels(name, code)
            self._series[method, code] = series
        seconds, ended = series
        seconds.observe(perf_counter() - began)
        ended.inc()


class PassTimes:
    """What the passes of one teacher take, and how full they are."""

    def __init__(
        self, *, queued: Histogram, took: Histogram, fill: Histogram, padding: Counter
    ) -> None:
        self._queued = queued
        self._took = took
        self._fill = fill
        self._padding = padding

    def queued(self, seconds: float) -> None:
        """Note that a request's first rows go into a pass."""
        self._queued.observe(seconds)

    def started(self, row_tokens: Iterable[int], max_batch_tokens: int) -> None:
        """Note what a pass that starts is made of."""
        rows = [tokens for tokens in row_tokens if tokens]
        real = sum(rows)
        self._fill.observe(real / max_batch_tokens)
        self._padding.inc(len(rows) * max(rows, default=0) - real)

    def took(self, seconds: float) -> None:
        """Note that a pass is over."""
        self._took.observe(seconds)
