"""The server's log: one line an event, as text or as JSON, on standard error.

An event is ``logger.info("session opened", extra={"facts": {...}})``: a fixed sentence and
its numbers apart, so that nobody parses prose. Events are logged once a change of state,
never once a call; of what callers may bring about as often as they like, some are left out
(``Throttle``). Nothing is configured at import: ``configure`` is for the one who owns
the process.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOTS = ("teacher_logits", "teacher_logits_server", "grpc", "opentelemetry")
FOREIGN = "opentelemetry."
MOST_ALIKE = 10
ALIKE_SECONDS = 60.0
_NEEDS_QUOTES = frozenset(" \"='")


class Throttle(logging.Filter):
    """Lets few of a kind of event through: of those that callers bring about, time and again.

    They say so: ``extra={"facts": {...}, "throttle": reason}``. Of one event and reason the first
    ``MOST_ALIKE`` in ``ALIKE_SECONDS`` are logged; the next one behind that says how many were
    left out. ``reason`` is one of few names, and never a text of the caller's. What an exporter of
    spans says again and again, while its collector is away, counts as one kind.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._lock = threading.Lock()
        self._spans: dict[tuple[str, str], _Span] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether to log an event."""
        reason: str | None = getattr(record, "throttle", None)
        event = record.getMessage()
        if record.name.startswith(FOREIGN):
            event, reason = record.name, ""
        if reason is None:
            return True
        with self._lock:
            span = self._spans.setdefault((event, reason), _Span())
            now = self._now()
            if now >= span.until:
                span.until, span.count = now + ALIKE_SECONDS, 0
            span.count += 1
            if span.count > MOST_ALIKE:
                span.left_out += 1
                return False
            left_out, span.left_out = span.left_out, 0
        if left_out:
            record.facts = {**_facts(record), "left_out": left_out}
        return True


@dataclass
class _Span:
    until: float = 0.0
    count: int = 0
    left_out: int = 0


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO session opened session_id=s-... transport=stream``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback below it where there is one."""
        words = [_instant(record), record.levelname, record.getMessage()]
        words += [f"{name}={_shown(value)}" for name, value in _facts(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``event``, ``logger``, then the facts."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry: dict[str, object] = {
            "time": _instant(record),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
        }
        entry.update({name: value for name, value in _facts(record).items() if name not in entry})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(*, format: str, level: str, stream: TextIO | None = None) -> logging.Handler:
    """Send the project's events, and gRPC's, to ``stream`` (standard error).

    Returns the handler, for ``unconfigure``.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(Throttle())
    for root in ROOTS:
        logger = logging.getLogger(root)
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False
    return handler


def unconfigure(handler: logging.Handler) -> None:
    """Undo ``configure``."""
    for root in ROOTS:
        logger = logging.getLogger(root)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def _facts(record: logging.LogRecord) -> Mapping[str, object]:
    facts: Mapping[str, object] = getattr(record, "facts", {})
    return facts


def _instant(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _shown(value: object) -> str:
    """Return a fact as one word, in quotes where it would not be one."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    is_word = text and text.isprintable() and not _NEEDS_QUOTES & set(text)
    return text if is_word else json.dumps(text)
