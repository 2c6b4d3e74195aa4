"""Grants of steps on their way from whoever brings them to whoever acquires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from teacher_logits.terms import StepGrant
    from teacher_logits_client.batch import Batch
    from teacher_logits_client.reader import OpenedLease

_MOST = 4096


@dataclass(frozen=True, kw_only=True)
class OpenedGrant:
    """A grant, with its leases opened, and the batch of them, where that was done ahead.

    ``seals`` say of each payload that an announced step awaits whether it is sealed.
    """

    grant: StepGrant
    leases: tuple[OpenedLease, ...] | None = None
    batch: Batch | None = None
    seals: tuple[Callable[[], bool], ...] = ()

    @property
    def is_made(self) -> bool:
        """Whether its batch is."""
        return self.batch is not None

    @property
    def is_sealed(self) -> bool:
        """Whether it may be handed out."""
        for is_sealed in self.seals:
            if not is_sealed():
                return False
        return True


class StepSource(Protocol):
    """Brings one session its steps."""

    def take(self, step: int, *, until: float, seconds: float) -> OpenedGrant:
        """Return a step, and wait for it until ``until`` (``time.monotonic`` seconds).

        Raises:
            DeadlinePassedError: it had not come within ``seconds``.
            TeacherLogitsError: why the step cannot be had.
        """

    def finish(self, step: int) -> None:
        """Note that a step that was taken is open, or given back."""

    def take_ready(self, step: int) -> OpenedGrant | None:
        """Return a step if its batch was made ahead; never waits."""

    def read_ahead(self, step: int) -> None:
        """Have the steps behind one that is being closed come, and open those that have.

        Waits for nothing.
        """

    def put_back(self, grant: StepGrant) -> None:
        """Keep a grant that could not be opened in time, for the next who asks."""

    def close(self) -> None:
        """Bring nothing more."""


class Recent:
    """The last few thousand steps that were added. Each method needs no lock."""

    def __init__(self) -> None:
        self._steps: dict[int, None] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def add(self, step: int) -> None:
        """Add a step."""
        self._steps[step] = None
        if len(self._steps) > _MOST:
            self._steps.pop(next(iter(self._steps)), None)
