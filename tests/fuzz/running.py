"""Running a surface: many inputs, and what the process holds before and after them."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.fuzz.surface import Complaints, Tally, Usage
from tests.fuzz.surfaces import OF_THE_SERVER, OTHERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.fuzz.house import House
    from tests.fuzz.surface import Surface

CHECKED_EVERY = 250
SLOWEST_SECONDS = 20.0
"""An input that takes longer hangs: whatever waits here waits for a tenth of a second at most."""

MORE_DESCRIPTORS, MORE_THREADS, MORE_MAPS = 16, 12, 96
"""What may come with connections and thread pools, whatever the number of inputs."""
MORE_RSS_BYTES = 64 << 20


class Run:
    """A surface under way: `one` tries an input, and all that must hold holds behind it."""

    def __init__(self, surface: Surface, complaints: Complaints) -> None:
        self.surface = surface
        self.tally = Tally()
        self.count = 0
        self.slowest_seconds = 0.0
        self._complaints = complaints
        self._before: Usage | None = None

    def warm_up(self) -> None:
        """Try every seed and the check, so that what is made once is made."""
        for seed in self.surface.seeds():
            self.one(seed)
        self.check()
        self._before = Usage.now()
        self.count, self.tally, self.slowest_seconds = 0, Tally(), 0.0

    def one(self, data: bytes) -> str:
        """Try one input.

        Raises:
            AssertionError: naming the input.
        """
        start = time.monotonic()
        try:
            word = self.surface.run(data)
            self._complaints.raise_any()
        except Exception as error:
            raise AssertionError(f"{self.surface.name}: {data!r}") from error
        took = time.monotonic() - start
        assert took < SLOWEST_SECONDS, (self.surface.name, took, data)
        self.slowest_seconds = max(self.slowest_seconds, took)
        self.tally.counts[word] += 1
        self.count += 1
        if self.count % CHECKED_EVERY == 0:
            self.check()
        return word

    def check(self) -> None:
        """Hold that it serves as before, and that nobody has complained."""
        self.surface.check()
        self._complaints.raise_any()

    def check_growth(self, *, more_rss_bytes: int = MORE_RSS_BYTES) -> tuple[Usage, Usage]:
        """Hold that the process holds what it held, but for what comes once; return both."""
        assert self._before is not None
        before, after = self._before, _settled(self._before)
        assert after.descriptors <= before.descriptors + MORE_DESCRIPTORS, (before, after)
        assert after.threads <= before.threads + MORE_THREADS, (before, after)
        assert after.maps <= before.maps + MORE_MAPS, (before, after)
        assert after.rss_bytes <= before.rss_bytes + more_rss_bytes, (before, after)
        return before, after


def _settled(before: Usage) -> Usage:
    """What the process holds once what is on its way out has gone."""
    until = time.monotonic() + SLOWEST_SECONDS
    while True:
        after = Usage.now()
        is_out = after.descriptors <= before.descriptors + MORE_DESCRIPTORS
        if is_out or time.monotonic() > until:
            return after


@contextmanager
def running(name: str, house: Callable[[], House]) -> Iterator[Run]:
    """Have a surface at hand, warmed up; ``house`` is asked for where it is of the server."""
    complaints = Complaints()
    make = OTHERS.get(name)
    with complaints.collected():
        surface = OF_THE_SERVER[name](house()) if make is None else make()
        try:
            run = Run(surface, complaints)
            run.warm_up()
            yield run
        finally:
            surface.close()
