"""Tracing: OpenTelemetry spans where somebody listens to them, and nothing where nobody does.

    trainer's span > acquire, score, reserve, seal > RPC of the server > batch > engine_pass

Somebody listens once this process has imported OpenTelemetry's API and given it a provider. Until
then nothing is imported here, no span is made, and calls carry nothing. Context travels as W3C
trace context: in the metadata of gRPC calls, and in a field of a broker line's requests.

A batch serves requests of several traces. It is a span of its first request's trace, with links
to the others, and the span of each of those has a link back.
"""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType
    from typing import TypeAlias

    from opentelemetry.trace import Span, Tracer

    Fact: TypeAlias = str | int | float | bool

P = ParamSpec("P")
R = TypeVar("R")

NAME = "teacher_logits"
"""Of the tracer, and what the names of a span's attributes begin with."""
_SPAN = "teacher-logits/"
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_TRACEPARENT_BYTES = 64
"""A traceparent has 55; what is longer is none of ours to read."""

_OFF: AbstractContextManager[None] = nullcontext()


def is_on() -> bool:
    """Whether this process has a provider of spans."""
    return _api() is not None


def traced(name: str, *told: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have each call of a function be a span; the keywords that are ``told`` stand in it."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            api = _api()
            if api is None:
                return function(*args, **kwargs)
            given = {key: kwargs.get(key) for key in told}
            facts = {k: v for k, v in given.items() if isinstance(v, int | str)}
            with _spanned(api, name, facts):
                return function(*args, **kwargs)

        return call

    return wrap


def span(name: str, facts: Mapping[str, Fact] | None = None) -> AbstractContextManager[object]:
    """Return a span around a ``with`` block, under the one that is current."""
    api = _api()
    return _OFF if api is None else _spanned(api, name, facts)


def current() -> Span | None:
    """Return the span that is current, if it is recorded."""
    api = _api()
    if api is None:
        return None
    here: Span = api.get_current_span()
    return here if here.is_recording() else None


def outgoing() -> tuple[tuple[str, str], ...] | None:
    """Return what a gRPC call carries of the current span; None where there is nothing."""
    api = _api()
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return None
    return tuple(_injected().items()) or None


def traceparent() -> str:
    """Return the current span as one line of text; empty where there is none."""
    api = _api()
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return ""
    return _injected().get(TRACEPARENT, "")


def serving(
    name: str, carried: Iterable[tuple[str, str | bytes]], facts: Mapping[str, Fact] | None = None
) -> AbstractContextManager[object]:
    """Return a span around the answer to a call, under the span that its caller sent along.

    Of what was carried nothing but the W3C trace context is looked at; what is none is ignored.
    """
    api = _api()
    return _OFF if api is None else _served(api, name, carried, facts)


def start(name: str, facts: Mapping[str, Fact], *, above: Sequence[Span]) -> Span | None:
    """Start a span of the first trace ``above``, tied to the others; whoever has it ends it.

    None without any of them: what nobody traces is no span.
    """
    api = _api()
    if api is None or not above:
        return None
    others = above[1:]
    made: Span = _tracer(api).start_span(
        _SPAN + name,
        context=api.set_span_in_context(above[0]),
        attributes=_named(facts),
        links=[api.Link(each.get_span_context()) for each in others],
    )
    for each in others:
        each.add_link(made.get_span_context())
    return made


def fail(span: Span, error: BaseException) -> None:
    """Say that what a span is about has failed; the error's text stays in the log."""
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, type(error).__name__))


def begin(name: str, facts: Mapping[str, Fact] | None = None) -> Span | None:
    """Start a span under the current one, for what ends elsewhere; whoever has it ends it."""
    api = _api()
    if api is None:
        return None
    return _tracer(api).start_span(_SPAN + name, attributes=_named(facts or {}))


def under(span: Span | None) -> AbstractContextManager[object]:
    """Make a span current for a ``with`` block; without ending it."""
    api = _api()
    return _OFF if api is None or span is None else api.use_span(span)


def _api() -> ModuleType | None:
    """Return OpenTelemetry's API, where this process has imported it and has a provider."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or not hasattr(api, "get_tracer_provider"):  # it is being imported
        return None
    if getattr(api, "_TRACER_PROVIDER", api) is None:  # the quick look; the slow one asks the OS
        return None
    provider = api.get_tracer_provider()
    return None if isinstance(provider, api.ProxyTracerProvider) else api


def _tracer(api: ModuleType) -> Tracer:
    tracer: Tracer = api.get_tracer(NAME)
    return tracer


@contextmanager
def _spanned(api: ModuleType, name: str, facts: Mapping[str, Fact] | None) -> Iterator[object]:
    with _tracer(api).start_as_current_span(
        _SPAN + name,
        attributes=_named(facts or {}),
        record_exception=False,
        set_status_on_exception=False,
    ) as made:
        with _failing(made):
            yield made


@contextmanager
def _served(
    api: ModuleType,
    name: str,
    carried: Iterable[tuple[str, str | bytes]],
    facts: Mapping[str, Fact] | None,
) -> Iterator[object]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    wanted = {
        key: value
        for key, value in carried
        if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)
    }
    with _tracer(api).start_as_current_span(
        name,
        context=TraceContextTextMapPropagator().extract(wanted),
        kind=api.SpanKind.SERVER,
        attributes=facts,
        record_exception=False,
        set_status_on_exception=False,
    ) as made:
        with _failing(made):
            yield made


@contextmanager
def _failing(span: Span) -> Iterator[None]:
    """Name the error that ends a span's block; its text is for the log."""
    try:
        yield
    except BaseException as error:
        fail(span, error)
        raise


def _injected() -> dict[str, str]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def _named(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    return {f"{NAME}.{key}": value for key, value in facts.items()}
