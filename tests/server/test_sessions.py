"""The table of sessions: how each one's end is learnt, and that nothing undoes it."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest

from teacher_logits.errors import (
    LimitReachedError,
    NotAllowedError,
    RequestInvalidError,
    SessionExpiredError,
)
from teacher_logits.grid import BatchGrid
from teacher_logits.profiles import StudentProfile
from teacher_logits.terms import SERVER_WRITER
from teacher_logits.transport import Settlement, Transport
from teacher_logits_server.sessions import Sessions
from teacher_logits_server.sessions.crowd import Crowd
from teacher_logits_server.sessions.session import Phase, Session
from teacher_logits_server.settlement.proofs import Line

TTL, OPENING_TTL = 30.0, 10.0
STUDENT = StudentProfile(
    batch_grid=BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
)
LINE = Line(pid=42, challenge=b"read me")


def table(limit: int = 8) -> Sessions:
    return Sessions(
        ttl=timedelta(seconds=TTL),
        opening_ttl=timedelta(seconds=OPENING_TTL),
        crowd=Crowd(max_sessions=limit, max_student_sessions=limit, max_publishers=limit),
    )


def opened(sessions: Sessions, name: str = "s", *, now: float = 0.0) -> Session:
    session = Session(
        session_id=name,
        request_id=f"request of {name}",
        nonce=b"n" * 32,
        profile=STUDENT,
        teacher_id="teacher",
        checks=(),
        vocabulary_size=10,
        opened_at=now,
        heard_at=now,
    )
    sessions.add(session)
    return session


def settled(
    sessions: Sessions,
    transport: Transport,
    *,
    line: Line | None = None,
    name: str = "s",
    now: float = 0.0,
) -> Session:
    session = opened(sessions, name, now=now)
    session.line = line
    sessions.settle(session, [Settlement(writer_id=SERVER_WRITER, transport=transport)], now=now)
    return session


class TestOpening:
    def test_ends_unless_it_is_settled_in_time(self) -> None:
        sessions = table()
        session = opened(sessions)

        assert sessions.living("s", now=OPENING_TTL - 1) is session
        with pytest.raises(SessionExpiredError):
            sessions.living("s", now=OPENING_TTL)

    def test_goes_on_while_the_call_waits_that_would_settle_it(self) -> None:
        sessions = table()
        session = opened(sessions)
        session.awaited_until = 3 * OPENING_TTL

        assert sessions.lapse(now=3 * OPENING_TTL - 1) == []
        assert sessions.lapse(now=3 * OPENING_TTL) == [session]

    def test_may_not_work(self) -> None:
        sessions = table()
        opened(sessions)

        with pytest.raises(NotAllowedError, match="ProveLocality"):
            sessions.settled("s", now=0)

    def test_repeated_with_its_request_id_is_the_same_session(self) -> None:
        sessions = table()
        session = opened(sessions)

        assert sessions.opened("request of s", STUDENT, now=1) is session
        assert sessions.opened("another request", STUDENT, now=1) is None

    def test_repeated_with_another_profile_is_refused(self) -> None:
        sessions = table()
        opened(sessions)

        with pytest.raises(RequestInvalidError, match="another profile"):
            sessions.opened("request of s", dataclasses.replace(STUDENT, top_k=1), now=1)

    def test_repeated_after_the_end_is_not_the_old_session(self) -> None:
        sessions = table()
        opened(sessions)

        assert sessions.opened("request of s", STUDENT, now=OPENING_TTL) is None

    def test_one_session_too_many_is_refused_with_the_numbers(self) -> None:
        sessions = table(limit=2)
        opened(sessions, "a")
        sessions.check_room(STUDENT)
        opened(sessions, "b")

        with pytest.raises(LimitReachedError, match="--max-sessions") as caught:
            sessions.check_room(STUDENT)

        assert caught.value.facts == {
            "limit_name": "sessions",
            "count": 2,
            "limit": 2,
            "flag": "--max-sessions",
        }
        assert caught.value.retry_after is not None

    def test_an_ended_session_makes_room(self) -> None:
        sessions = table(limit=1)
        opened(sessions)
        sessions.lapse(now=OPENING_TTL)

        sessions.check_room(STUDENT)


class TestTheNonce:
    def test_is_good_once(self) -> None:
        sessions = table()
        opened(sessions)
        sessions.show_nonce("s", b"n" * 32, now=0)

        with pytest.raises(NotAllowedError, match="good for one"):
            sessions.show_nonce("s", b"n" * 32, now=0)

    @pytest.mark.parametrize("wrong", [b"", b"n" * 31, b"x" * 32])
    def test_a_wrong_one_is_refused_and_uses_up_nothing(self, wrong: bytes) -> None:
        sessions = table()
        opened(sessions)

        with pytest.raises(NotAllowedError, match="not the nonce"):
            sessions.show_nonce("s", wrong, now=0)
        sessions.show_nonce("s", b"n" * 32, now=0)

    def test_comes_too_late_once_the_session_is_settled(self) -> None:
        sessions = table()
        settled(sessions, Transport.STREAM)

        with pytest.raises(NotAllowedError, match="before ProveLocality"):
            sessions.show_nonce("s", b"n" * 32, now=0)

    def test_of_an_ended_session_is_good_for_nothing(self) -> None:
        sessions = table()
        opened(sessions)

        with pytest.raises(SessionExpiredError):
            sessions.show_nonce("s", b"n" * 32, now=OPENING_TTL)


class TestLiveness:
    @pytest.mark.parametrize(
        ("transport", "line", "phase", "liveness"),
        [
            (Transport.SHARED_MEMORY, LINE, Phase.LOCAL, "line"),
            (Transport.LOCAL, LINE, Phase.LOCAL, "line"),
            (Transport.LOCAL, None, Phase.REMOTE, "ttl"),
            (Transport.STREAM, None, Phase.REMOTE, "ttl"),
            (Transport.STREAM, LINE, Phase.REMOTE, "ttl"),
        ],
    )
    def test_is_the_lines_where_memory_is_shared_and_the_ttls_elsewhere(
        self, transport: Transport, line: Line | None, phase: Phase, liveness: str
    ) -> None:
        session = settled(table(), transport, line=line)

        assert session.phase is phase
        assert session.liveness == liveness
        assert session.shares_memory == (transport is not Transport.STREAM)

    def test_a_session_with_a_line_has_no_ttl(self) -> None:
        sessions = table()
        session = settled(sessions, Transport.SHARED_MEMORY, line=LINE)

        assert sessions.lapse(now=1e9) == []
        assert sessions.living("s", now=1e9) is session

    def test_a_remote_session_ends_a_ttl_after_its_last_sign_of_life(self) -> None:
        sessions = table()
        session = settled(sessions, Transport.STREAM)
        sessions.hear("s", now=TTL - 1)

        assert sessions.lapse(now=2 * TTL - 2) == []
        assert sessions.lapse(now=2 * TTL - 1) == [session]

    def test_a_ttl_counts_from_the_settlement(self) -> None:
        sessions = table()
        session = opened(sessions)
        settlement = Settlement(writer_id=SERVER_WRITER, transport=Transport.STREAM)
        sessions.settle(session, [settlement], now=9)

        assert sessions.lapse(now=TTL) == []
        assert sessions.lapse(now=TTL + 9) == [session]

    def test_no_sign_of_life_comes_in_time_after_the_ttl_swept_or_not(self) -> None:
        sessions = table()
        session = settled(sessions, Transport.STREAM)

        with pytest.raises(SessionExpiredError, match="never revived"):
            sessions.hear("s", now=TTL)
        sessions.note(session, now=TTL)
        with pytest.raises(SessionExpiredError):
            sessions.living("s", now=TTL)
        assert sessions.lapse(now=TTL) == [session]
        with pytest.raises(SessionExpiredError):
            sessions.hear("s", now=TTL)

    def test_a_session_lapses_once(self) -> None:
        sessions = table()
        settled(sessions, Transport.STREAM)

        assert len(sessions.lapse(now=TTL)) == 1
        assert sessions.lapse(now=TTL) == []


class TestClosing:
    @pytest.mark.parametrize("transport", [Transport.LOCAL, Transport.SHARED_MEMORY])
    def test_leaves_a_session_that_shares_memory_to_its_readers(self, transport: Transport) -> None:
        sessions = table()
        session = settled(sessions, transport, line=LINE)

        assert not sessions.close(session)
        assert session.phase is Phase.CLOSED

    def test_ends_a_session_that_streams(self) -> None:
        sessions = table()
        session = settled(sessions, Transport.STREAM)

        assert sessions.close(session)
        assert session.phase is Phase.ENDED

    def test_ends_a_session_that_was_never_settled(self) -> None:
        sessions = table()

        assert sessions.close(opened(sessions))

    def test_takes_its_work_away_either_way(self) -> None:
        sessions = table()
        sessions.close(settled(sessions, Transport.SHARED_MEMORY, line=LINE))

        with pytest.raises(SessionExpiredError):
            sessions.settled("s", now=0)

    def test_a_closed_session_without_a_line_still_has_its_ttl(self) -> None:
        sessions = table()
        session = settled(sessions, Transport.LOCAL)
        sessions.close(session)
        sessions.note(session, now=TTL - 1)

        assert sessions.lapse(now=TTL) == [session]


class TestForgetting:
    def test_leaves_nothing_of_an_ended_session(self) -> None:
        sessions = table()
        session = opened(sessions)
        sessions.lapse(now=OPENING_TTL)

        sessions.drop(session)

        assert sessions.find("s") is None
        assert list(sessions) == []

    def test_a_session_that_has_not_ended_cannot_be_forgotten(self) -> None:
        sessions = table()

        with pytest.raises(ValueError, match="has not ended"):
            sessions.drop(opened(sessions))

    def test_keeps_a_newer_session_of_the_same_request(self) -> None:
        sessions = table()
        old = opened(sessions)
        sessions.lapse(now=OPENING_TTL)
        new = dataclasses.replace(old, session_id="new", phase=Phase.OPENING, opened_at=20.0)
        sessions.add(new)

        sessions.drop(old)

        assert sessions.opened("request of s", STUDENT, now=20) is new

    def test_an_unknown_session_has_ended(self) -> None:
        with pytest.raises(SessionExpiredError):
            table().living("never", now=0)
