"""Batches of a loader, read some ahead so that their scores can be asked for.

Promises the same batches in the same order, none twice and none lost.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Read = TypeVar("Read")
Batch = TypeVar("Batch")


class ReadAhead(Generic[Read, Batch]):
    """The batches of one iterator; ``prepare`` makes each ready as soon as it is read.

    ``is_stream`` is whether nobody knows how many there are; ``first`` are some that are ready
    already, as ``left`` has those of the stream before.
    """

    def __init__(
        self,
        batches: Iterator[Read],
        prepare: Callable[[Read], Batch],
        *,
        ahead: int,
        is_stream: bool,
        first: Iterable[Batch] = (),
    ) -> None:
        self.batches = batches
        self._prepare = prepare
        self._ahead = ahead
        self._is_stream = is_stream
        self._held = deque(first)
        self._is_at_end = self._has_taken = False

    @classmethod
    def behind(
        cls,
        before: ReadAhead[Read, Batch] | None,
        batches: Iterator[Read],
        prepare: Callable[[Read], Batch],
        *,
        ahead: int,
        is_stream: bool,
    ) -> ReadAhead[Read, Batch]:
        """Return the batches of an iterator, behind what is left of the one before."""
        if before is not None and before.batches is batches:
            return before
        left = () if before is None else before.left
        return cls(batches, prepare, ahead=ahead, is_stream=is_stream, first=left)

    def take(self, count: int) -> list[Batch]:
        """Return the next batches, having read ``ahead`` more behind them.

        Fewer where fewer are left, as the last step of an epoch may have. None where fewer are
        left of a stream: those stay in ``left``, for the first step of the next epoch. A trainer
        that does not know how long an epoch is takes no step with them at its end, and would add
        their gradients, divided by their own count, to that step's.

        Raises:
            ConfigError: there are too few for any step.
        """
        while len(self._held) < count + self._ahead:
            try:
                self._held.append(self._prepare(next(self.batches)))
            except StopIteration:
                self._is_at_end = True
                break
        if self._is_stream and len(self._held) < count:
            self._check_one_step(count)
            return []
        self._has_taken = True
        return [self._held.popleft() for _ in range(min(count, len(self._held)))]

    def _check_one_step(self, count: int) -> None:
        if self._held and not self._has_taken:
            raise ConfigError(
                f"an epoch has {len(self._held)} micro batches, and a step takes {count} "
                "(gradient_accumulation_steps): no step would ever be taken; give more rows, or "
                "lower it",
                facts={"micro_batches": len(self._held), "gradient_accumulation_steps": count},
            )

    @property
    def left(self) -> list[Batch]:
        """What nobody took of a stream that is at its end."""
        return list(self._held) if self._is_stream and self._is_at_end else []


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
