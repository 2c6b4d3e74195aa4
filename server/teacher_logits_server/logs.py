"""The server's log: one line an event, as text or as JSON, on standard error.

An event is ``logger.info("session opened", extra={"facts": {...}})``: a fixed sentence and
its numbers apart, so that nobody parses prose. Events are logged once a change of state,
never once a call. Nothing is configured at import: ``configure`` is for the one who owns
the process.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOTS = ("teacher_logits", "teacher_logits_server", "grpc", "opentelemetry")
_NEEDS_QUOTES = frozenset(" \"='")


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
