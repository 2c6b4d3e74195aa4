"""Mail: which steps a local session wants sent ahead, and what its publisher is to be told.

Pure, and bounded: a session wants at most ``MAX_WANTED_STEPS`` steps, and freed payloads
gather in one message, and so do slabs that are gone, at most those that a session was passed, and
writers that have come, at most those of its teacher. Of steps that it can never have, the reasons
of the highest ``MAX_BARRED_STEPS`` are kept: a lower one is retired, or is looked into again.
Each wanted step is sent once; asked for again, it is sent again only when what was sent before
has come back. A step that failed is told to who asks for it, and not to who only wants it ahead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teacher_logits.errors import RequestInvalidError
from teacher_logits.keys import STEP_LIMIT
from teacher_logits.terms import RoomFreed, SlabsGone, StepWithdrawn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from teacher_logits.errors import TeacherLogitsError

MAX_WANTED_STEPS = 16
MAX_BARRED_STEPS = 64
"""Steps that a session can never have, and of which it is remembered why."""


@dataclass(kw_only=True)
class Mailbox:
    """What one session is to be sent. Only the table changes it."""

    wanted: range = range(0)
    sent: set[int] = field(default_factory=set)
    freed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    #: Writers of device memory that came, by id.
    came: list[str] = field(default_factory=list)
    #: Steps that can never be had, and why.
    barred: dict[int, TeacherLogitsError] = field(default_factory=dict)
    withdrawn: list[int] = field(default_factory=list)
    #: Wanted steps of which it is told nothing before they are complete.
    declined: set[int] = field(default_factory=set)
    #: The lowest open step that a publisher was told last.
    told_lowest: int = 0


class Mail:
    """The mailboxes of all sessions."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}

    def want(
        self, session_id: str, first_step: int, count: int, *, is_out: Callable[[int], bool]
    ) -> None:
        """Want ``count`` steps from ``first_step`` on, instead of what was wanted before.

        ``is_out`` says whether some of what was sent of a step has not come back yet.

        Raises:
            RequestInvalidError: too many, none, or a step that cannot be.
        """
        if not 1 <= count <= MAX_WANTED_STEPS or not 0 <= first_step < STEP_LIMIT:
            raise RequestInvalidError(
                f"steps {first_step} to {first_step + count - 1} are wanted: ask for 1 to "
                f"{MAX_WANTED_STEPS} at a time, from 0 on and below {STEP_LIMIT}",
                facts={"first_step": first_step, "count": count, "limit": MAX_WANTED_STEPS},
            )
        box = self._boxes.setdefault(session_id, Mailbox())
        box.wanted = range(first_step, first_step + count)
        box.declined.intersection_update(box.wanted)
        box.sent = {
            step for step in box.sent if is_out(step) or (step in box.wanted and step != first_step)
        }

    def due(self, session_id: str) -> list[int]:
        """Return the wanted steps that were not sent, the one asked for first."""
        box = self._boxes.get(session_id, Mailbox())
        return [step for step in box.wanted if step not in box.sent]

    def is_asked(self, session_id: str, step: int) -> bool:
        """Say whether a step is the one that is asked for now."""
        box = self._boxes.get(session_id)
        return box is not None and step == box.wanted.start

    def note_sent(self, session_id: str, step: int) -> None:
        """Note that a step goes out."""
        self._boxes[session_id].sent.add(step)

    def withdraw(self, session_id: str, step: int) -> bool:
        """Take back a step that went out before it was sealed; say whether it can be told."""
        box = self._boxes.get(session_id)
        if box is not None:
            box.sent.discard(step)
            box.withdrawn.append(step)
        return box is not None

    def decline(self, session_id: str, step: int) -> None:
        """Have a step that went out before it was sealed go out again, once it is complete."""
        box = self._boxes.get(session_id)
        if box is not None:
            box.sent.discard(step)
            box.declined.add(step)

    def has_declined(self, session_id: str, step: int) -> bool:
        """Say whether a session has no use for a step before it is complete."""
        box = self._boxes.get(session_id)
        return box is not None and step in box.declined

    def take_withdrawn(self, session_id: str) -> list[StepWithdrawn]:
        """Return the steps that were taken back, each once."""
        box = self._boxes.get(session_id, Mailbox())
        withdrawn, box.withdrawn = box.withdrawn, []
        return [StepWithdrawn(step=step) for step in withdrawn]

    def wants(self, session_id: str, steps: Collection[int]) -> bool:
        """Say whether a session wants one of these and was not sent it."""
        box = self._boxes.get(session_id)
        return box is not None and any(s in box.wanted and s not in box.sent for s in steps)

    def note_freed(self, session_id: str, payload_id: str) -> None:
        """Note that a payload's room is its writer's again."""
        self._boxes.setdefault(session_id, Mailbox()).freed.append(payload_id)

    def take_freed(self, session_id: str, lowest_open_step: int) -> RoomFreed | None:
        """Return the payloads whose room is free again, each once.

        None where there are none and the publisher knows the lowest open step.
        """
        box = self._boxes.setdefault(session_id, Mailbox())
        freed, box.freed = tuple(box.freed), []
        if not freed and lowest_open_step == box.told_lowest:
            return None
        box.told_lowest = lowest_open_step
        return RoomFreed(payload_ids=freed, lowest_open_step=lowest_open_step)

    def note_lowest(self, session_id: str, lowest_open_step: int) -> None:
        """Note that a publisher was told the lowest open step."""
        self._boxes.setdefault(session_id, Mailbox()).told_lowest = lowest_open_step

    def open(self, session_id: str) -> None:
        """Have a box for a session, which may be sent what it did not ask for."""
        self._boxes.setdefault(session_id, Mailbox())

    def note_gone(self, session_id: str, slab_id: str) -> bool:
        """Note that a slab that a session was passed is gone; say whether it can be told."""
        box = self._boxes.get(session_id)
        if box is not None:
            box.gone.append(slab_id)
        return box is not None

    def take_gone(self, session_id: str) -> SlabsGone | None:
        """Return the slabs that are gone, each once; None where there are none."""
        box = self._boxes.get(session_id)
        if box is None or not box.gone:
            return None
        gone, box.gone = tuple(box.gone), []
        return SlabsGone(slab_ids=gone)

    def bar(self, session_id: str, step: int, why: TeacherLogitsError) -> None:
        """Note that a session can never have a step, which does not wait for it."""
        barred = self._boxes.setdefault(session_id, Mailbox()).barred
        barred[step] = why
        if len(barred) > MAX_BARRED_STEPS:
            del barred[min(barred)]

    def check_barred(self, session_id: str, step: int) -> None:
        """Refuse a step that a session can never have.

        Raises:
            TeacherLogitsError: what was noted.
        """
        box = self._boxes.get(session_id)
        why = box.barred.get(step) if box is not None else None
        if why is not None:
            raise type(why)(why.message, facts=why.facts)

    def note_came(self, session_id: str, writer_id: str) -> None:
        """Note that a writer has come whose device memory a session may try."""
        self._boxes.setdefault(session_id, Mailbox()).came.append(writer_id)

    def take_came(self, session_id: str) -> list[str]:
        """Return the writers that have come, each once."""
        box = self._boxes.get(session_id, Mailbox())
        came, box.came = box.came, []
        return came

    def forget(self, session_id: str) -> None:
        """Send a session nothing any more."""
        self._boxes.pop(session_id, None)
