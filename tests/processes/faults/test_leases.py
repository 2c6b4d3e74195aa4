"""Leases that are returned late, twice, by others, slowly, by force or never."""

from collections.abc import Iterator
from signal import SIGCONT, SIGSTOP
from typing import TypeAlias

import pytest
from tests.processes.faults.cast import Role
from tests.processes.faults.stage import Stage, await_true
from tests.processes.faults.step_plays import HARM, StepPlays
from tests.reports.raw import Raw, connect_raw, refused

from teacher_logits.errors import TeacherLogitsError
from teacher_logits.v1 import operator_service_pb2, teacher_logits_service_pb2
from teacher_logits.views import LeaseView

LONG_SECONDS = 60.0
Shown: TypeAlias = tuple[tuple[str, str], ...]


@pytest.fixture
def reader(stage: Stage) -> Iterator[Role]:
    """A student that holds a scored payload."""
    role = stage.student("victim")
    stage.enter(role, "shared_memory")
    role.do("score", session="it", step=stage.step())
    yield role
    role.do("end")


@pytest.fixture
def other(stage: Stage) -> Iterator[Role]:
    """A student that writes over whatever room there is."""
    role = stage.student("bystander")
    stage.enter(role, "shared_memory")
    yield role
    role.do("end")


@pytest.fixture
def raw(stage: Stage) -> Iterator[Raw]:
    """Calls by somebody who is no client of ours."""
    with connect_raw(stage.cast.address) as raw:
        yield raw


def lease_of(stage: Stage, role: Role) -> LeaseView:
    """Return the one lease of a role, once what it had before has come back."""
    found: list[LeaseView] = []

    def is_alone() -> bool:
        view = stage.cast.inspect()
        own = {each.session_id for each in view.sessions if each.pid == role.pid}
        found[:] = [each for each in view.leases if each.session_id in own]
        return len(found) == 1

    await_true(is_alone, f"{role} has one lease")
    return found[0]


def shown_by(role: Role) -> Shown:
    """What the calls of a role's session show."""
    pairs = role.do("shown", session="it")
    return tuple((str(key), str(value)) for key, value in pairs)


def release(raw: Raw, session_id: str, lease_id: str, shown: Shown = ()) -> None:
    raw.student.ReleasePayload(
        teacher_logits_service_pb2.ReleasePayloadRequest(session_id=session_id, lease_id=lease_id),
        timeout=LONG_SECONDS,
        metadata=shown,
    )


def test_a_release_of_somebody_elses_lease_is_refused_and_frees_nothing(
    stage: Stage, reader: Role, other: Role, raw: Raw
) -> None:
    lease = lease_of(stage, reader)
    other.do("score", session="it", step=stage.step())
    foreign = lease_of(stage, other)
    shown = shown_by(other)
    error = refused(lambda: release(raw, foreign.session_id, lease.lease_id, shown)).error
    assert isinstance(error, TeacherLogitsError)
    stage.await_leases(reader, 1)
    other.do("close")
    other.do("cycle", session="it", step=stage.step())
    reader.do("read")


def test_a_lease_that_is_returned_twice_is_returned_once(
    stage: Stage, reader: Role, other: Role, raw: Raw
) -> None:
    lease = lease_of(stage, reader)
    shown = shown_by(reader)
    reader.do("close", twice=True)
    # Its room is somebody else's now, and a late return of it takes nothing from them.
    other.do("score", session="it", step=stage.step())
    release(raw, lease.session_id, lease.lease_id, shown)
    stage.await_leases(other, 1)
    reader.do("cycle", session="it", step=stage.step())
    other.do("read")


def test_a_release_after_the_end_of_its_session_changes_nothing(
    stage: Stage, reader: Role, other: Role, raw: Raw
) -> None:
    lease = lease_of(stage, reader)
    shown = shown_by(reader)
    reader.do("end")
    other.do("score", session="it", step=stage.step())
    refused(lambda: release(raw, lease.session_id, lease.lease_id, shown))
    stage.await_leases(other, 1)
    other.do("read")


def test_a_stopped_local_student_keeps_its_room_and_is_seen(
    stage: Stage, reader: Role, other: Role
) -> None:
    reader.signal(SIGSTOP)
    for _ in range(8):
        other.do("cycle", session="it", step=stage.step())
    (session,) = [each for each in stage.cast.inspect().sessions if each.pid == reader.pid]
    assert session.lease_count == 1
    assert session.leased_bytes > 0
    reader.signal(SIGCONT)
    reader.do("read")


def test_a_forced_reclaim_under_a_reader_shows_at_its_exit_check(
    stage: Stage, reader: Role, other: Role, raw: Raw
) -> None:
    reclaim(raw, lease_of(stage, reader))
    use_the_room(stage, other)
    assert "StalePayloadError" in reader.error_of(reader.ask("close")).kinds


def test_a_reader_of_torn_bytes_always_learns_of_it(stage: Stage, other: Role, raw: Raw) -> None:
    for _ in range(3):
        reader = stage.student("victim")
        stage.enter(reader, "shared_memory")
        reader.do("score", session="it", step=stage.step())
        reading = reader.ask("read_on")
        reclaim(raw, lease_of(stage, reader))
        use_the_room(stage, other)
        reader.do("halt")
        wrong, is_told = reader.answer(reading)
        assert is_told, f"{wrong} reads were wrong, and nobody was told"
        reader.do("end")


def reclaim(raw: Raw, lease: LeaseView) -> None:
    raw.operator.Reclaim(
        operator_service_pb2.ReclaimRequest(lease_id=lease.lease_id), timeout=LONG_SECONDS
    )


def use_the_room(stage: Stage, writer: Role) -> None:
    """Have room written that came free: the pool gives out the smallest that will do."""
    names = [f"filler {number}" for number in range(3)]
    for name in names:
        writer.do("score", session="it", step=stage.step(), name=name)
    for name in names:
        writer.do("close", name=name)


def test_room_is_used_again_only_when_the_slowest_student_has_returned_it(stage: Stage) -> None:
    plays = StepPlays(stage)
    with plays.company("shared_memory", "shared_memory") as (publishers, reader):
        slow = stage.student("victim")
        plays.read_by(slow, "shared_memory", "slow")
        plays.publish(publishers, HARM)
        slow.do("arm", name="read")
        reading = slow.ask("read_step", session="it", step=HARM)
        slow.await_point()
        step = HARM
        error = None
        while error is None:  # the quick one returns all, and the writers write on
            reader.do("read_step", session="it", step=step)
            step += 1
            calls = [(role, role.ask("publish", step=step, timeout=2.0)) for role in publishers]
            error = next(filter(None, [role.end_of(call) for role, call in calls]), None)
        assert "PoolFullError" in error.kinds
        assert all(word in error.message for word in ("need", "free", "bytes")), error.message
        waiting = [(role, role.ask("publish", step=step)) for role in publishers]
        slow.do("go")
        slow.answer(reading)
        for number in range(HARM + 1, step):
            slow.do("read_step", session="it", step=number)
        for role, call in waiting:
            role.end_of(call)


def test_a_reader_that_never_reads_its_line_harms_itself_alone(stage: Stage) -> None:
    deaf = stage.student("victim")
    with stage.undisturbed() as bystander:
        stage.enter(deaf, "shared_memory")
        deaf.do("shout", session="it")
        stage.see_progress(bystander)
        deaf.do("end")
