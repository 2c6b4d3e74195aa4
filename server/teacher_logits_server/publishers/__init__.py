"""Publishers: which teachers are published here, by whom, and whether all of them are there.

Pure. The publishers of one teacher agree on everything but their own place (rank, hints), and
each of its shards has one publisher. One that closed its session in good order counts as there
while something that it wrote is left to read; one that died does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from teacher_logits.errors import NotAvailable, UnknownTeacherError, Violation
from teacher_logits.profiles import NodeHints
from teacher_logits.shard_parts import PartGrid, part_grid, shard_of
from teacher_logits_server.publishers.promises import promised
from teacher_logits_server.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_server.publishers.engines import EngineTeachers
    from teacher_logits_server.settlement.device_offers import DeviceOffer


class TeacherAbsent(UnknownTeacherError):
    """Nobody has come by that name yet; waiting may help."""


class TeacherIncomplete(NotAvailable):
    """Some of the teacher's publishers are not there yet; the message names their shards."""


WAITABLE = (TeacherAbsent, TeacherIncomplete)
"""Why a student may have to wait for its session."""


@dataclass(kw_only=True)
class Member:
    """One publisher. ``writer_id`` is empty until it has settled where it writes.

    ``offer`` is device memory that readers may open, where it writes slabs of its own there.
    """

    session_id: str
    shard: int
    hints: NodeHints
    writer_id: str = ""
    has_closed: bool = False
    offer: DeviceOffer | None = None

    def settle(self, writer_id: str, *, streams: bool) -> None:
        """Learn where it writes; what it streams lies in no memory of its own."""
        self.writer_id = writer_id
        self.offer = None if streams or self.offer is None else self.offer.of(writer_id)


@dataclass(kw_only=True)
class Published:
    """A teacher with publishers. Only the table changes it."""

    #: Without what is each publisher's own.
    profile: TeacherProfile
    steps: Steps
    members: dict[int, Member] = field(default_factory=dict)
    #: When a publisher or a student left last, in seconds of the ledger's clock.
    left_at: float = 0.0

    @property
    def global_batch_size(self) -> int:
        """Rows of a step."""
        return self.profile.batch_grid.global_batch_size if self.profile.batch_grid else 0

    @property
    def parts(self) -> PartGrid:
        """Into how many shards the rows of a data-parallel rank are divided."""
        return part_grid(self.profile)

    @property
    def shard_count(self) -> int:
        """Shards of a step."""
        grid = self.profile.batch_grid
        return grid.data_parallel_size * self.parts.count if grid else 0

    def offers(self) -> dict[str, DeviceOffer]:
        """Return the device memory that those offer who are there, by writer."""
        return {
            member.writer_id: member.offer
            for member in self.members.values()
            if member.writer_id and member.offer is not None and not member.has_closed
        }

    def missing_shards(self) -> list[int]:
        """Return the shards that nobody publishes."""
        there = {
            shard
            for shard, member in self.members.items()
            if member.writer_id and not (member.has_closed and self.steps.is_empty)
        }
        return [shard for shard in range(self.shard_count) if shard not in there]

    @property
    def is_deserted(self) -> bool:
        """Whether no publisher and no student is there."""
        return self.steps.seats.is_empty and all(m.has_closed for m in self.members.values())

    @property
    def is_left_over(self) -> bool:
        """Whether it was read, and is deserted: what is left waits for nobody who is known."""
        return self.is_deserted and self.steps.seats.were_taken


class Publishers:
    """The published teachers.

    Args:
        engines: the teachers that the server's own engines are.
        keep_steps: see ``Steps``.
    """

    def __init__(self, *, engines: EngineTeachers, keep_steps: int) -> None:
        self._engines = engines
        self._keep_steps = keep_steps
        self._published: dict[str, Published] = {}

    def __iter__(self) -> Iterator[Published]:
        return iter(list(self._published.values()))

    def profiles(self) -> tuple[TeacherProfile, ...]:
        """Return the teachers there are."""
        return (*self._engines.profiles, *(each.profile for each in self._published.values()))

    def find(self, teacher_id: str) -> Published | None:
        """Return a published teacher."""
        return self._published.get(teacher_id)

    def choose(self, teacher_id: str) -> TeacherProfile:
        """Return the teacher that a student asks for, once all of it is there.

        An empty id will do where there is one only.

        Raises:
            TeacherAbsent: nobody has come by that name.
            TeacherIncomplete: some of its publishers are not there.
            UnknownTeacherError: there are several, and none was named.
        """
        found = find_teacher(teacher_id, self.profiles())
        published = self._published.get(found.teacher_id)
        missing = published.missing_shards() if published is not None else []
        if published is not None and missing:
            raise _incomplete(published, missing)
        return found

    def check(self, profile: TeacherProfile) -> list[Violation]:
        """Return what keeps a publisher from being one of its teacher's, its shard aside."""
        if self._engines.find(profile.teacher_id) is not None:
            has = f"one of this server's own (those are: {self._engines.names})"
            taken = (
                f"teacher {profile.teacher_id!r} is {has}, and nobody can publish under its name: "
                "give the publishers another teacher_id"
            )
            return [replace(_conflict(profile, "teacher_id", has, "a publisher's"), message=taken)]
        published = self._published.get(profile.teacher_id)
        if published is None or published.is_deserted:
            return []
        violations = []
        agreed, says = published.profile, shared(profile)
        for each in fields(agreed):
            has, said = getattr(agreed, each.name), getattr(says, each.name)
            if each.name != "hints" and has != said:
                violations.append(_conflict(profile, each.name, has, said))
        return violations

    def holders(self, profile: TeacherProfile) -> list[str]:
        """Return the session that publishes a publisher's shard already, if there is one."""
        published = self._published.get(profile.teacher_id)
        taken = published.members.get(shard_of(profile)) if published is not None else None
        return [] if taken is None or taken.has_closed else [taken.session_id]

    def enter(
        self, session_id: str, profile: TeacherProfile, *, offer: DeviceOffer | None = None
    ) -> Published:
        """Take a publisher in that breaks no rule.

        Where nobody was left of its teacher, steps may begin anew; what lies there from before
        stays if it is of the same kind.
        """
        published = self._published.get(profile.teacher_id)
        if published is None:
            steps = Steps(keep_steps=self._keep_steps)
            published = Published(profile=shared(profile), steps=steps)
            self._published[profile.teacher_id] = published
        elif published.is_deserted:
            if replace(published.profile, hints=NodeHints()) != replace(
                shared(profile), hints=NodeHints()
            ):
                published.steps.retire_all()
                published.members.clear()
            published.steps.begin_anew()
            published.profile = shared(profile)
        shard = shard_of(profile)
        published.members[shard] = Member(
            session_id=session_id, shard=shard, hints=profile.hints, offer=offer
        )
        return published

    def member(self, teacher_id: str, session_id: str) -> Member | None:
        """Return a publisher that is there."""
        published = self._published.get(teacher_id)
        for member in published.members.values() if published is not None else ():
            if member.session_id == session_id:
                return member
        return None

    def leave(self, teacher_id: str, session_id: str, *, in_good_order: bool) -> None:
        """Learn that a publisher is gone."""
        member = self.member(teacher_id, session_id)
        published = self._published.get(teacher_id)
        if member is None or published is None:
            return
        if in_good_order and member.writer_id:
            member.has_closed = True
        else:
            del published.members[member.shard]

    def note_left(self, teacher_id: str, *, now: float) -> None:
        """Learn that a publisher or a student of a teacher has left."""
        published = self._published.get(teacher_id)
        if published is not None:
            published.left_at = now
            self.forget_if_over(teacher_id)

    def left_over(self, *, since: float) -> list[Published]:
        """Return the teachers that were read, and deserted at that time or before."""
        return [each for each in self if each.is_left_over and each.left_at <= since]

    def forget_if_over(self, teacher_id: str) -> None:
        """Forget a teacher of which nobody and nothing is left."""
        published = self._published.get(teacher_id)
        if published is not None and published.is_deserted and published.steps.is_empty:
            del self._published[teacher_id]


def find_teacher(teacher_id: str, teachers: Sequence[TeacherProfile]) -> TeacherProfile:
    """Return the teacher a student asks for; an empty id will do where there is one only.

    Raises:
        TeacherAbsent: there is none of that id, with those there are.
        UnknownTeacherError: there are several, and none was named.
    """
    found = [teacher for teacher in teachers if teacher_id in ("", teacher.teacher_id)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(teacher.teacher_id for teacher in teachers)) or "none"
    asked = teacher_id[:128]
    what = f"there is no teacher {asked!r} here" if asked else "the student names no teacher"
    kind = UnknownTeacherError if found else TeacherAbsent
    way_out = "; say which (teacher_id)" if found else ""
    facts = {"teacher_id": asked, "teachers": names}
    raise kind(f"{what}; there are: {names}{way_out}", facts=facts)


def shared(profile: TeacherProfile) -> TeacherProfile:
    """Return what all publishers of a teacher say alike."""
    model = profile.model_grid
    if model is not None:
        model = replace(model, tensor_parallel_rank=0, context_parallel_rank=0)
    return replace(promised(profile), data_parallel_rank=0, model_grid=model)


def _incomplete(published: Published, missing: list[int]) -> TeacherIncomplete:
    texts = map(published.parts.text_of, missing[:16])
    shards = ", ".join(texts) + (" ..." if len(missing) > 16 else "")
    size = published.shard_count
    teacher_id = published.profile.teacher_id
    return TeacherIncomplete(
        f"teacher {teacher_id!r} has {size} publishers, and {len(missing)} of them have not come: "
        f"shard {shards}",
        facts={
            "teacher_id": teacher_id,
            "publishers": size,
            "missing": len(missing),
            "missing_shards": shards,
        },
    )


def _conflict(profile: TeacherProfile, name: str, has: object, says: object) -> Violation:
    has_text, says_text = str(has)[:200], str(says)[:200]
    return Violation(
        rule="teacher_grid_conflict",
        message=f"teacher {profile.teacher_id!r}: {name} is {has_text} by those who came first, "
        f"and {says_text} by this publisher; have all of them say the same, or use another "
        "teacher id",
        facts={"field": name, f"teacher_{name}": has_text, f"publisher_{name}": says_text},
    )
