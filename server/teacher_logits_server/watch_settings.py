"""What a server is told of those who watch it; a group of ``settings``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from teacher_logits.addresses import read_address
from teacher_logits_server import readers
from teacher_logits_server.flags import setting as _set


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """who watches it"""

    metrics: str = _set(
        "",
        "--metrics",
        readers.ADDRESS,
        "host:port of a page for Prometheus, http://host:port/metrics; port 0 lets the system "
        "choose (default: none)",
    )
    insecure_metrics: bool = _set(
        False,
        "--insecure-metrics",
        readers.SWITCH,
        "allow an address of --metrics that other hosts reach: plain HTTP, and whoever reaches it "
        "sees how the server is used; it opens nothing else, as --insecure does not open this",
    )
    otlp_endpoint: str = _set(
        "",
        "--otlp-endpoint",
        readers.NAME,
        "send traces to the OpenTelemetry collector at http://host:4317 or https://host:4317, over "
        "gRPC (needs the extra: pip install 'teacher-logits[otel]')",
    )
    reflection: bool = _set(
        False,
        "--reflection",
        readers.SWITCH,
        "tell the schema to tools such as grpcurl, by gRPC reflection (needs the extra: pip "
        "install 'teacher-logits[reflection]')",
    )


class _Told(Protocol):
    """What the rule below needs of a server's settings."""

    @property
    def metrics(self) -> str: ...
    @property
    def otlp_endpoint(self) -> str: ...
    @property
    def insecure_metrics(self) -> bool: ...
    @property
    def listen(self) -> tuple[str, ...]: ...


def broken_rule(config: _Told) -> tuple[str, object, str] | None:
    """Return the first setting that makes no sense: its field, value, and the rule."""
    endpoint = config.otlp_endpoint
    if endpoint and not endpoint.startswith(("http://", "https://")):
        return "otlp_endpoint", endpoint, "must begin with http://, or with https:// for TLS"
    if not config.metrics:
        if config.insecure_metrics:
            rule = "allows an address of --metrics, and there is none: give one, or leave this out"
            return "insecure_metrics", "true", rule
        return None
    address = read_address(config.metrics, what="--metrics", takes_unix=False)
    if address.is_unix:
        return "metrics", config.metrics, "must be host:port: Prometheus scrapes over HTTP"
    if not (config.insecure_metrics or address.is_loopback):
        rule = (
            "can be reached from other hosts, and whoever reaches it sees how the server is used, "
            "unencrypted: give 127.0.0.1, or say --insecure-metrics if all who reach it may"
        )
        return "metrics", config.metrics, rule
    if address.port and address in [read_address(each, what="--listen") for each in config.listen]:
        return "metrics", config.metrics, "is an address of --listen too; choose another"
    return None
