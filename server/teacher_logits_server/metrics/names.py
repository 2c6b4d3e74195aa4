"""Every metric of a server, defined once: its name, kind, labels, help and buckets.

Names are a promise to dashboards and alerts: one is added, none is renamed or removed within a
major release. ``docs/observability.md`` lists them all, and a test holds the two together.

No label ever has an id, an address or a text of a client's: each of ``LABELS`` has its values from
a closed list of the code, or from the server's own settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import CollectorRegistry

LABELS: Mapping[str, str] = {
    "surface": "rpc, line, broker or tls: where it was asked",
    "reason": "the stable name of an error, of why the broker takes no connection, or of why a "
    "transport is not on offer",
    "class": "contract_violation, stale_reference, not_available, transport_failure or internal",
    "rule": "the stable name of a broken rule of a handshake",
    "method": "an RPC of this server, as Service/Method",
    "code": "a gRPC status code",
    "call": "a kind of request of a broker line",
    "for": "what a call waits for: teacher, step, room or object",
    "transport": "a transport; none, or several for a session that reads its writers differently",
    "role": "student or publisher",
    "state": "a state of the table that the metric's row names",
    "pool": "host or device: the memory of the server's own slabs",
    "stage": "open, complete, lost or deserted",
    "kind": "own or published",
    "teacher": "a teacher of the server's own settings; never one that is published",
    "version": "the server's release",
    "protocol": "the protocol that it speaks",
    "epoch": "this life of the server",
}
"""Where the values of each label come from."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. ``kind`` is ``counter``, ``gauge`` or ``histogram``; only that has buckets.

    ``name`` is as it stands on the page: a counter ends in ``_total``, and units are in it.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def counter(self, registry: CollectorRegistry | None) -> Counter:
        """Make a counter of it, in a registry if one is given."""
        return Counter(self.name, self.help, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry | None) -> Gauge:
        """Make a gauge of it, likewise."""
        return Gauge(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry | None) -> Histogram:
        """Make a histogram of it, likewise."""
        return Histogram(self.name, self.help, self.labels, buckets=self.buckets, registry=registry)


_metrics: list[Metric] = []


def _add(name: str, kind: str, help: str, *labels: str, buckets: tuple[float, ...] = ()) -> Metric:
    full = f"teacher_logits_{name}"
    _metrics.append(Metric(name=full, kind=kind, help=help, labels=labels, buckets=buckets))
    return _metrics[-1]


def _counter(name: str, help: str, *labels: str) -> Metric:
    return _add(name, "counter", help, *labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return _add(name, "gauge", help, *labels)


def _seconds(name: str, help: str, *labels: str) -> Metric:
    return _add(name, "histogram", help, *labels, buckets=_SECONDS)


# The server
BUILD_INFO = _gauge("build_info", "1, with what runs here.", "version", "protocol", "epoch")
SERVING = _gauge("serving", "1 while health says SERVING.")
DRAINING = _gauge("draining", "1 from the drain on.")
CERTIFICATE_ENDS = _gauge(
    "certificate_expiry_timestamp_seconds",
    "When the server's certificate ends, in seconds since 1970; only there with TLS.",
)

# Who is there
SESSIONS = _gauge(
    "sessions", "Sessions, in the states that inspect shows.", "role", "transport", "state"
)
TEACHERS = _gauge("teachers", "Teachers that students may ask for.", "kind")
LINES = _gauge("lines", "Open connections to the broker.")
STREAMS = _gauge("streams", "Payloads that are being streamed now.")

# Payloads and room
LEASES = _gauge("leases", "Leases: held, or quarantined.", "state")
LEASED_BYTES = _gauge("leased_bytes", "Bytes of room that leases hold, each counted.", "state")
GRANTED = _counter("leases_granted_total", "Leases granted.", "transport")
GRANTED_BYTES = _counter(
    "granted_bytes_total", "Bytes of payloads that leases were granted on.", "transport"
)
STREAMED_BYTES = _counter("streamed_bytes_total", "Bytes of chunks that were streamed.")
POOL_BYTES = _gauge(
    "pool_bytes",
    "Bytes of a pool's budget: free, used, reserved (being written) or quarantined.",
    "pool",
    "state",
)
POOL_SLABS = _gauge("pool_slabs", "Slabs of a pool.", "pool")
REGISTERED = _gauge("registered_payloads", "Registered payloads that are held, in any slab.")
REGISTERED_BYTES = _gauge("registered_bytes", "Bytes of room that they take.")
PUBLISHER_BYTES = _gauge(
    "publisher_slab_bytes", "Bytes of publishers' own slabs: free, used or quarantined.", "state"
)
PUBLISHER_SLABS = _gauge("publisher_slabs", "Slabs of publishers' own.")
STEPS = _gauge("steps", "Steps of published teachers that are not retired.", "stage")
AWAITED_READERS = _gauge("awaited_readers", "Ranks that those steps wait for, summed.")

# An object store
OBJECT_JOINED = _gauge("object_store_joined", "1 while the Ray cluster is joined.")
OBJECTS = _gauge("objects", "Payloads in the object store.")
OBJECT_BYTES = _gauge("object_bytes", "Bytes of the budget there: free or used.", "state")
OBJECT_WAITING = _gauge("objects_waiting", "Payloads that wait for room there.")
OBJECT_SPILLED = _counter("object_store_spilled_bytes_total", "Bytes that the store has spilled.")
HOLDER_RESTARTS = _counter("object_holder_restarts_total", "Restarts of the holder.")

# The server's own teachers
QUEUE_REQUESTS = _gauge(
    "queue_requests", "Scoring requests: waiting or running.", "teacher", "state"
)
QUEUE_TOKENS = _gauge("queue_tokens", "Tokens of rows that wait.", "teacher")
SCORED_REQUESTS = _counter("scored_requests_total", "Scoring requests done.", "teacher")
SCORED_TOKENS = _counter("scored_tokens_total", "Tokens of those, prefixes included.", "teacher")
QUEUED_SECONDS = _seconds(
    "queued_seconds", "From a request's arrival to the first pass with rows of it.", "teacher"
)
PASS_SECONDS = _seconds("pass_seconds", "What a pass took.", "teacher")
BATCH_FILL = _add(
    "batch_fill_ratio",
    "histogram",
    "Tokens of a pass, padding left out, as a share of max_batch_tokens.",
    "teacher",
    buckets=_SHARES,
)
PADDING = _counter("padding_tokens_total", "Tokens that passes computed as padding.", "teacher")
REPLICAS = _gauge("replicas", "Replicas, in the states that inspect shows.", "teacher", "state")
REPLICA_PASSES = _gauge("replica_passes", "Passes that replicas have to compute.", "teacher")
REPLICA_RESTARTS = _counter("replica_restarts_total", "Restarts of replicas.", "teacher")

# Calls
RPC_SECONDS = _seconds("rpc_seconds", "Time to an RPC's end, waits and streams too.", "method")
RPCS = _counter("rpcs_total", "RPCs that have ended.", "method", "code")
RPCS_OPEN = _gauge("rpcs_in_flight", "RPCs under way, health left out.")
LINE_CALLS = _counter("line_calls_total", "Requests of broker lines.", "call")
WAIT_SECONDS = _seconds("wait_seconds", "What a call waited in the server.", "for")

# What went wrong
REFUSALS = _counter(
    "refusals_total",
    "Calls and connections that were refused, by where and why.",
    "surface",
    "reason",
)
BROKEN_RULES = _counter(
    "broken_rules_total",
    "Rules of a handshake that refused callers broke; one refusal may name several.",
    "rule",
)
ERRORS = _counter(
    "errors_total",
    "Calls that ended in an error, by what the caller can do about it.",
    "surface",
    "class",
)
TRANSPORT_REFUSALS = _counter(
    "transport_refusals_total",
    "Wanted transports that a session settled without, by why.",
    "transport",
    "reason",
)

METRICS = tuple(_metrics)
"""All of them, in the order of this file."""
