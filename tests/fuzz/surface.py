"""What is fuzzed: surfaces, each a function of bytes, and what nobody may see of one.

A surface has *seeds*, inputs that it takes as they are, and tries one input at a time. What it
answers with may be an error of the tree and nothing else. An input is text where it names
something, and bytes behind that, so that a mutation of it mostly still reaches what it names.
"""

from __future__ import annotations

import gc
import logging
import os
import struct
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PATIENCE_SECONDS = 30.0
"""How long anything may take before it counts as hung."""

_LENGTH = struct.Struct("<H")
LONGEST_PART = (1 << 16) - 1


class Surface(Protocol):
    """One way in."""

    name: str

    def seeds(self) -> Sequence[bytes]:
        """Return inputs that are in order; mutations begin there."""

    def run(self, data: bytes) -> str:
        """Try one input; return in a word what became of it, for the tally.

        Raises:
            AssertionError: something happened that must not.
        """

    def check(self) -> None:
        """Hold that all is as it was, once in a while."""

    def close(self) -> None:
        """Let go of what is held."""


def joined(parts: Sequence[bytes]) -> bytes:
    """Several messages as one input, each behind its length."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def split(data: bytes) -> list[bytes]:
    """The messages of an input; a length that goes beyond the end takes what there is."""
    parts, at = [], 0
    while at + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        parts.append(data[at : at + size])
        at += size
    return parts


@dataclass(frozen=True)
class Usage:
    """What a process holds of its machine."""

    descriptors: int
    maps: int
    threads: int
    rss_bytes: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        with open("/proc/self/maps", encoding="utf-8") as maps:
            map_count = sum(1 for _ in maps)
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            maps=map_count,
            threads=len(os.listdir("/proc/self/task")),
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )


class Complaints(logging.Handler):
    """Collects what must not happen unseen: errors and tracebacks in logs, threads that died."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            text = logging.Formatter().format(record)
            self.found.append(f"{record.name}: {text} {getattr(record, 'facts', '')}")

    def raise_any(self) -> None:
        found, self.found = self.found, []
        assert not found, found[0]

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect for the block."""
        root, hook = logging.getLogger(), threading.excepthook

        def died(what: threading.ExceptHookArgs) -> None:
            self.found.append(f"a thread died of {what.exc_value!r}")
            hook(what)

        root.addHandler(self)
        threading.excepthook = died
        try:
            yield
        finally:
            root.removeHandler(self)
            threading.excepthook = hook


@dataclass
class Tally:
    """What became of the inputs."""

    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return ", ".join(f"{word} {count}" for word, count in self.counts.most_common(8))
