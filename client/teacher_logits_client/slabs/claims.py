"""Claims: what a publisher asks for, and the way by which its bytes come to be read.

There are two ways, with one interface: into slabs of its own that readers on this node map
(``own_slabs``), or through a buffer that is streamed to the server (``uploads``).
"""

from __future__ import annotations

import enum
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import NotAvailable, ReservationLapsedError, TeacherLogitsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from teacher_logits.devices.probe import Probe
    from teacher_logits.layout import Column
    from teacher_logits.payload import Payload
    from teacher_logits.payload_room import WriterRoom
    from teacher_logits.terms import Reservation
    from teacher_logits_client.line import Line
    from teacher_logits_client.slabs.placed_columns import Registered
    from teacher_logits_client.slabs.placed_room import Place


_log = logging.getLogger("teacher_logits_client")

ABANDON_SECONDS = 5.0
"""How long the server may take to hear that a reservation is given up."""


def seconds_until(until: float) -> float:
    """Return the seconds that are left, a little where none are: every call has a deadline."""
    return max(0.001, until - time.monotonic())


class DraftStage(enum.Enum):
    """Where a draft stands."""

    OPEN = "open"
    #: A seal went out and was not answered: it may be sealed, and readers may have it.
    DOUBTFUL = "sealed, as far as is known"
    SEALED = "sealed"
    ABANDONED = "abandoned"


@dataclass(kw_only=True, eq=False)
class Claim:
    """Rows of a step to be written: ``payload`` has a key and no payload id yet.

    ``place`` is where its publisher's own tensors lie; None where the pool is to say.
    ``request_id`` is that of the last request: a new one where the server gave the one before up.
    """

    request_id: str
    payload: Payload
    row_positions: tuple[int, ...]
    real_rows: int
    place: Place | None = None

    @property
    def step(self) -> int:
        """The step."""
        return self.payload.key.step if self.payload.key is not None else -1


@dataclass(frozen=True, kw_only=True)
class Sealing:
    """What is said of a payload when it is sealed; ``digest`` is empty where it is no repeat."""

    columns: tuple[Column, ...]
    bad_row_count: int
    valid_count: int | None
    digest: str


@dataclass(frozen=True, kw_only=True)
class Granted:
    """A right to write, and the payload's room; ``is_written`` where its owner wrote there.

    ``rouse`` wakes readers that wait for a payload whose seal is a moment away, so that it finds
    them awake; nothing depends on it.
    """

    reservation: Reservation
    room: WriterRoom
    is_written: bool = False
    rouse: Callable[[], None] | None = None


class Way(Protocol):
    """How a publisher's payloads come to be read; used from any thread.

    ``until`` is in seconds of ``time.monotonic``.
    """

    line: Line | None
    #: Where it writes to a device: its driver, and which device.
    probe: Probe | None

    @property
    def registered(self) -> Mapping[str, Registered]:
        """Memory that its publisher registered, by slab."""

    def reserve(self, claim: Claim, *, until: float) -> Granted:
        """Claim rows and wait for room.

        Raises:
            PoolFullError: no room came free in time.
            PayloadInvalidError: it can never fit.
            PayloadConflictError: the rows are another's, or reserved already.
            PayloadRetiredError: the step is over.
            PayloadInvalidError: it is not what the profile says.
        """

    def announce(self, payload_id: str, valid_count: int | None) -> None:
        """Tell readers that wait for it where a payload is being written, where they can look.

        Its rows are described there already. ``valid_count`` as its seal will say it. Waits for
        nothing; what is not heard is missed by nobody.

        Raises:
            ServerUnreachableError: the line has ended.
        """

    def seal(self, payload_id: str, sealing: Sealing, *, until: float) -> None:
        """Have a payload read from now on; a try that was not answered may be repeated.

        Raises:
            PayloadConflictError: its rows were sealed before, with other bytes.
            ReservationLapsedError: the right to write has ended.
            DeadlinePassedError: the server did not answer; whether it is sealed is not known.
        """

    def abandon(self, payload_id: str, *, until: float) -> bool:
        """Give a reservation up and free its room; safe to repeat.

        True where the server had sealed it all the same: then its readers have the room.
        """

    def wait_free(self, *, until: float, but_copied: bool = False) -> None:
        """Wait until nobody reads what was sealed, where that lies in memory of our own.

        With ``but_copied`` what the host has a copy of is not waited for.

        Raises:
            DeadlinePassedError: somebody does, with whom it waits for.
        """

    def give_up(self, claim: Claim) -> None:
        """Give up a claim that was not answered: the server may have granted it."""

    def close(self) -> None:
        """Let go of memory and line. What is sealed stays readable."""


class Desk(Protocol):
    """What a draft needs of its publisher."""

    way: Way
    default_seconds: float

    def check(self) -> None:
        """Refuse to go on in a forked child, and once the publisher is closed or its session over.

        Raises:
            ForkedClientError, SessionExpiredError, EpochChangedError: as it says.
        """

    def is_here(self) -> bool:
        """Say whether this is the publisher's own process, and no fork of it."""

    def later(self, job: Callable[[], None]) -> None:
        """Do something soon, on another thread; safe in a finaliser."""


def lapsed(stage: DraftStage, *, payload_id: str, step: int) -> ReservationLapsedError:
    """Return the error for a draft that is not to be written any more."""
    if stage is DraftStage.DOUBTFUL:
        text = (
            f"a seal of the draft of step {step} was not answered, and readers may have it: "
            "nothing of it may be written any more; seal it again, or abandon it"
        )
    else:
        text = (
            f"the draft of step {step} is {stage.value}; reserve the rows again to write them anew"
        )
    return ReservationLapsedError(text, facts={"payload_id": payload_id, "step": step})


def abandon(way: Way, payload_id: str) -> None:
    """Give a reservation up; a job for another thread.

    Raises:
        NotAvailable: the server cannot be told now.
    """
    try:
        way.abandon(payload_id, until=time.monotonic() + ABANDON_SECONDS)
    except NotAvailable:
        if way.line is None or not way.line.has_ended:
            raise  # to be tried again
    except TeacherLogitsError as error:
        # The session has ended, and the reservation with it: nothing is owed.
        _log.debug("payload %s is gone already: %s", payload_id, error.message)
