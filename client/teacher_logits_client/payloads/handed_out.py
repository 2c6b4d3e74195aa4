"""What is handed out over leased room: given back once, by its owner or as its block is left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

from teacher_logits.errors import StalePayloadError

if TYPE_CHECKING:
    from types import TracebackType


class HandedOut(ABC):
    """A context manager over leases, which come back with it."""

    def close(self) -> None:
        """Give back what is leased; twice is fine, and in a forked child nothing happens.

        Raises:
            StalePayloadError: some bytes were overwritten while they were leased, or are not
                those that were opened where a digest check was asked for.
        """
        self._close(warn_level=3)

    def abandon(self) -> None:
        """Give it back without a word, where something worse is being said already."""
        with suppress(StalePayloadError):
            self._close(warn_level=0)

    @abstractmethod
    def _close(self, *, warn_level: int) -> None:
        """Close; ``warn_level`` is the caller to name in a warning, 0 for none."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._close(warn_level=3)
        elif isinstance(error, Exception):
            # Views are held by the error's own traceback. Overwritten bytes may explain it.
            self._close(warn_level=0)
        else:
            self.abandon()  # nothing stands in for an interrupt or the end of the program
