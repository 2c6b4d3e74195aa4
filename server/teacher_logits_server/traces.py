"""Traces: where a server of its own process sends its spans, over OTLP.

A program that embeds a server, or runs it under ``opentelemetry-instrument``, has its own provider,
and needs nothing of this. Whatever the standard ``OTEL_*`` variables say beyond the address,
such as a sampler or headers, is the SDK's to read.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICE_NAME = "teacher-logits"
LAST_SPANS_SECONDS = 3.0
"""How long the end of a server waits for a collector that does not answer."""


@contextmanager
def exported(endpoint: str) -> Iterator[None]:
    """Have this process's spans sent to a collector; nothing where ``endpoint`` is empty.

    Raises:
        ConfigError: the extra that it takes is not installed.
    """
    if not endpoint:
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import set_tracer_provider
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint {endpoint}: OpenTelemetry is not installed ({error}): "
            "pip install 'teacher-logits[otel]', or leave the flag out",
            facts={"flag": "--otlp-endpoint", "value": endpoint},
        ) from error
    named = Resource({"service.name": SERVICE_NAME}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    set_tracer_provider(provider)
    try:
        yield
    finally:
        ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(LAST_SPANS_SECONDS)
