"""How long a session waits to be let in: for its teacher, and for the place of one that died."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests import forked
from tests.server.services.registry_rig import (
    ROWS,
    TOP_K,
    VOCABULARY,
    a_student,
    a_teacher,
    serving,
)

import teacher_logits_client as tl
from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import (
    DeadlinePassedError,
    SessionRefusedError,
    UnknownTeacherError,
)
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits_client.calls import told
from teacher_logits_server.broker.peers import is_gone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.server.services.registry_rig import Wire

BOTH = f"""
import sys
import teacher_logits_client as tl

grid = tl.BatchGrid(global_batch_size={ROWS}, data_parallel_size=1, micro_batch_size=1)
teacher = tl.TeacherProfile(
    teacher_id="killed", batch_grid=grid, data_parallel_rank=0, top_k={TOP_K},
    vocabulary_size={VOCABULARY}, head_rows={VOCABULARY}, max_row_tokens=64,
)
student = tl.StudentProfile(
    teacher_id="published", batch_grid=grid, top_k={TOP_K}, student_id="killed"
)
room = {{"pool_size_bytes": 1 << 16, "slab_size_bytes": 1 << 16}}
with tl.connect(sys.argv[1]) as client, client.open_publisher(teacher, **room) as publisher:
    with client.open_session(student) as session:
        print(publisher.transport.value, session.transport.value, flush=True)
        input()
"""
"""Publishes a shard and reads a rank until it is killed."""

BRIEF = {"session_ttl": timedelta(seconds=1), "renew_interval": timedelta(seconds=0.5)}
BEAT_SECONDS = 0.05


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    folder: Path = tmp_path_factory.mktemp("s")
    with serving(folder) as wire:
        wire.publisher(a_teacher())
        yield wire


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A server where no call waits for long."""
    folder: Path = tmp_path_factory.mktemp("h")
    with serving(folder, default_wait=timedelta(seconds=0.2)) as wire:
        wire.publisher(a_teacher())
        yield wire


@contextmanager
def renewing(wire: Wire, session_id: str) -> Iterator[None]:
    """Signs of life of a session, one after another."""
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(BEAT_SECONDS):
            request = messages.RenewSessionRequest(session_id=session_id)
            wire.students.RenewSession(request, timeout=30)

    heart = threading.Thread(target=renew)
    heart.start()
    try:
        yield
    finally:
        stop.set()
        heart.join()


class TestARankThatIsRead:
    def test_is_refused_at_once_where_the_kernel_says_that_its_reader_lives(
        self, wire: Wire
    ) -> None:
        profile = a_student(teacher_id="published", student_id="lives")
        wire.student(profile)
        began = MonotonicClock().now()

        with pytest.raises(SessionRefusedError, match="rank_taken"):
            wire.student(profile, timeout=600)
        assert MonotonicClock().now() - began < 600

    def test_is_had_at_once_when_its_reader_has_closed(self, wire: Wire) -> None:
        profile = a_student(teacher_id="published", student_id="closes")
        reader = wire.student(profile)
        wire.students.CloseSession(
            messages.CloseSessionRequest(session_id=reader.session_id), timeout=30
        )

        wire.student(profile)

    def test_is_refused_with_the_next_sign_of_life_of_a_reader_elsewhere(self, wire: Wire) -> None:
        profile = a_student(teacher_id="published", student_id="renews")
        reader = wire.student(profile, streams=True)
        with renewing(wire, reader.session_id):
            with pytest.raises(SessionRefusedError, match="rank_taken"):
                wire.student(profile, streams=True)

    def test_is_had_when_the_time_of_a_silent_reader_elsewhere_is_over(
        self, tmp_path: Path
    ) -> None:
        profile = a_student(teacher_id="published", student_id="silent")
        with serving(tmp_path, **BRIEF) as wire:
            wire.publisher(a_teacher())
            wire.student(profile, streams=True)

            wire.student(profile, streams=True)

    def test_says_how_long_a_silent_reader_keeps_it_where_the_call_cannot_wait(
        self, hasty: Wire
    ) -> None:
        profile = a_student(teacher_id="published", student_id="short")
        hasty.student(profile, streams=True)

        with pytest.raises(SessionRefusedError, match=r"free within \d") as refusal:
            hasty.student(profile, streams=True)
        left = refusal.value.facts["free_within_seconds"]
        assert isinstance(left, float)
        assert 0 < left < 30
        assert refusal.value.retry_after is not None


class TestAShardThatIsPublished:
    def test_is_refused_at_once_where_the_kernel_says_that_its_publisher_lives(
        self, wire: Wire
    ) -> None:
        profile = a_teacher(teacher_id="lives")
        wire.publisher(profile)

        with pytest.raises(SessionRefusedError, match="shard_taken"):
            wire.publisher(profile)

    def test_is_refused_with_the_next_sign_of_life_of_a_publisher_elsewhere(
        self, wire: Wire
    ) -> None:
        profile = a_teacher(teacher_id="renews")
        publisher = wire.publisher(profile, streams=True)
        with renewing(wire, publisher.session_id):
            with pytest.raises(SessionRefusedError, match="shard_taken"):
                wire.publisher(profile, streams=True)

    def test_is_had_when_the_time_of_a_silent_publisher_elsewhere_is_over(
        self, tmp_path: Path
    ) -> None:
        profile = a_teacher()
        with serving(tmp_path, **BRIEF) as wire:
            wire.publisher(profile, streams=True)

            wire.publisher(profile, streams=True)

    def test_says_how_long_a_silent_publisher_keeps_it_where_the_call_cannot_wait(
        self, hasty: Wire
    ) -> None:
        profile = a_teacher(teacher_id="short")
        hasty.publisher(profile, streams=True)

        with pytest.raises(SessionRefusedError, match=r"free within \d") as refusal:
            hasty.publisher(profile, streams=True)
        left = refusal.value.facts["free_within_seconds"]
        assert isinstance(left, float)
        assert 0 < left < 30
        assert refusal.value.retry_after is not None


def test_a_place_is_had_at_once_when_the_process_that_had_it_was_killed(wire: Wire) -> None:
    student = a_student(teacher_id="published", student_id="killed")
    teacher = a_teacher(teacher_id="killed")
    child = forked.Popen(
        [sys.executable, "-c", BOTH, wire.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "shared_memory shared_memory\n"
        with pytest.raises(SessionRefusedError, match=f"read by process {child.pid} on"):
            wire.student(student)
        with pytest.raises(SessionRefusedError, match=f"published by process {child.pid} on"):
            wire.publisher(teacher)
        child.kill()
        child.wait()

        wire.student(student)  # it may not even have been told dead yet
        wire.publisher(teacher)


class TestATeacherThatDoesNotCome:
    def test_was_waited_for_and_the_error_says_so(self, hasty: Wire) -> None:
        with pytest.raises(
            UnknownTeacherError, match=r"waited for.*start its publishers"
        ) as raised:
            hasty.student(a_student(teacher_id="absent"))

        assert "published" in str(raised.value.facts["teachers"])
        assert raised.value.facts["waited_seconds"]

    def test_is_named_in_the_students_log_while_it_is_waited_for(
        self, hasty: Wire, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(told, "MOMENT_SECONDS", 0.01)
        with tl.connect(hasty.address) as client, pytest.raises(UnknownTeacherError):
            client.open_session(a_student(teacher_id="publshed"))

        [said] = [each.getMessage() for each in caplog.records if "waited for up" in each.message]
        assert "there is no teacher 'publshed' here; there are: " in said
        assert "published" in said

    def test_is_named_in_the_log_only_where_it_takes_longer_than_a_moment(
        self, wire: Wire, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(told, "MOMENT_SECONDS", 60.0)
        late = (UnknownTeacherError, DeadlinePassedError)  # whoever says so first
        with tl.connect(wire.address) as client, pytest.raises(late):
            client.open_session(a_student(teacher_id="absent"), timeout=0.1)

        assert "waited for up" not in caplog.text

    def test_leaves_nothing_behind_when_the_student_gives_up(
        self, wire: Wire, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object) -> str:
            raise KeyboardInterrupt

        monkeypatch.setattr(told, "MOMENT_SECONDS", 0.01)
        monkeypatch.setattr(told, "waits_from_metadata", interrupt)
        with tl.connect(wire.address) as client, pytest.raises(KeyboardInterrupt):
            client.open_session(a_student(teacher_id="late", student_id="gave-up"))

        wire.publisher(a_teacher(teacher_id="late"))
        wire.student(a_student(teacher_id="late", student_id="gave-up"))

    def test_is_named_with_the_shards_that_lack(self, hasty: Wire) -> None:
        hasty.publisher(a_teacher(0, of=2, teacher_id="half"))

        with pytest.raises(DeadlinePassedError, match="shard 1"):
            hasty.student(a_student(teacher_id="half"))


def test_a_process_that_is_over_is_gone_and_one_that_nobody_saw_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        with open(f"/proc/{child.pid}/stat") as stat:
            started = int(stat.read().rpartition(")")[2].split()[19])
        assert not is_gone(child.pid, started)
        assert is_gone(child.pid, started + 1)
        assert not is_gone(child.pid, 0)
    assert is_gone(child.pid, started)
