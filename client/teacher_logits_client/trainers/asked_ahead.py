"""Batches of a loader, read some ahead so that their scores can be asked for.

Promises the same batches in the same order, none twice and none lost.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Read = TypeVar("Read")
Batch = TypeVar("Batch")


class ReadAhead(Generic[Read, Batch]):
    """The batches of one iterator; ``prepare`` makes each ready as soon as it is read."""

    def __init__(
        self, batches: Iterator[Read], prepare: Callable[[Read], Batch], *, ahead: int
    ) -> None:
        self.batches = batches
        self._prepare = prepare
        self._ahead = ahead
        self._held: deque[Batch] = deque()

    def take(self, count: int) -> list[Batch]:
        """Return the next batches, fewer at the end, having read ``ahead`` more behind them."""
        while len(self._held) < count + self._ahead:
            try:
                self._held.append(self._prepare(next(self.batches)))
            except StopIteration:
                break
        return [self._held.popleft() for _ in range(min(count, len(self._held)))]


class EvaluationBatches(Generic[Read, Batch]):
    """A loader whose batches are read ahead, for an evaluation loop; all else is the loader's.

    ``prepare`` is told of each batch how many of its rows on this rank are no repeats: where
    ranks have unequal shares, accelerate fills up the last batch from the start. It says by
    ``end_of_dataloader`` that the last batch is in use, which is kept true to the batch
    handed out, and not to the last one read.
    """

    def __init__(
        self,
        loader: object,
        prepare: Callable[[Read, bool], Batch],
        *,
        ahead: int,
    ) -> None:
        self._loader = loader
        self._prepare = prepare
        self._ahead = ahead

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        batches: Iterator[Read] = iter(self._loader)  # type: ignore[call-overload]
        held: deque[Batch] = deque()
        is_last = False
        while True:
            while not is_last and len(held) <= self._ahead:
                try:
                    read = next(batches)
                except StopIteration:
                    is_last = True
                    break
                is_last = self._is_at_end
                held.append(self._prepare(read, is_last))
            if not held:
                break
            batch = held.popleft()
            self._note_end(is_last and not held)
            yield batch
        for _ in batches:  # it has none left, and tidies up behind the last
            pass

    @property
    def _is_at_end(self) -> bool:
        return bool(getattr(self._loader, "end_of_dataloader", False))

    def _note_end(self, is_last: bool) -> None:
        if hasattr(self._loader, "end_of_dataloader"):
            self._loader.end_of_dataloader = is_last
