"""Streams whose work is done by whoever waits for it, and not before."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class FakeStream:
    """Work in its order. ``device.index`` is where it is done, as a stream of torch's says it."""

    def __init__(self, uuid: str, ordinal: int = 0) -> None:
        self.uuid = uuid
        self.device = SimpleNamespace(index=ordinal)
        self._lock = threading.RLock()
        self._work: deque[Callable[[], None]] = deque()
        self._given = self._done = 0

    def push(self, work: Callable[[], None]) -> None:
        """Add something to do."""
        with self._lock:
            self._work.append(work)
            self._given += 1

    def event(self) -> FakeEvent:
        """Return the point behind all that was added."""
        with self._lock:
            return FakeEvent(self, self._given)

    def is_done(self, number: int) -> bool:
        """Say whether the first so many are done."""
        return self._done >= number

    def work_until(self, number: int) -> None:
        """Do the first so many, as far as they are not done."""
        with self._lock:
            while self._done < number:
                self._work.popleft()()
                self._done += 1


class FakeEvent:
    """A point in a stream's work."""

    def __init__(self, stream: FakeStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def is_past(self) -> bool:
        """Say whether all before it is done; it gets there by ``wait`` alone."""
        return self._stream.is_done(self._number)

    def wait(self) -> None:
        """Do all that is before it."""
        self._stream.work_until(self._number)


class Streams:
    """The streams of all devices, and each thread's current ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, list[FakeStream]] = {}
        self._here = threading.local()

    def new(self, uuid: str, ordinal: int) -> FakeStream:
        """Make one."""
        self.current(uuid)
        with self._lock:
            self._made[uuid].append(made := FakeStream(uuid, ordinal))
        return made

    def current(self, uuid: str) -> FakeStream:
        """Return this thread's current one, by default the first of the device."""
        used: dict[str, FakeStream] = self._here.__dict__
        if uuid in used:
            return used[uuid]
        with self._lock:
            return self._made.setdefault(uuid, [FakeStream(uuid)])[0]

    def all(self, uuid: str) -> list[FakeStream]:
        """Return those of a device."""
        with self._lock:
            return list(self._made.get(uuid, ()))

    @contextlib.contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        """Make one current in this thread for the block."""
        used: dict[str, FakeStream] = self._here.__dict__
        before = used.get(stream.uuid)
        used[stream.uuid] = stream
        try:
            yield
        finally:
            if before is None:
                del used[stream.uuid]
            else:
                used[stream.uuid] = before
