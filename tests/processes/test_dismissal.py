"""A token that is taken out of the file ends what was opened with it, whoever calls or not."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import pytest
import torch
from tests.client.publishing.a_publisher import a_student, a_teacher, expected, some_rows
from tests.client.publishing.test_publisher import same
from tests.processes.guarded import (
    SECONDS,
    TOKENS,
    Guarded,
    guarded_server,
    metric_of,
    write_tokens,
)
from tests.transport_suite.writing import a_profile

import teacher_logits_client as tl
from teacher_logits.errors import SessionExpiredError, UnknownCallerError
from teacher_logits.views import ServerView

ROWS = [[3, 1, 4, 1, 5], [9, 2, 6]]
LINE_CALLS = "teacher_logits_line_calls_total"
CLOSED_ONE = {"closed", "alive"}
HALF = {("publisher", "closed"), ("student", "alive")}
Without: TypeAlias = Callable[[str], None]


@pytest.fixture(scope="module")
def place() -> Iterator[Guarded]:
    with guarded_server(allow_uid=4711) as guarded:
        yield guarded


@pytest.fixture
def without(place: Guarded) -> Iterator[Without]:
    """Takes somebody's token out of the file, until the end of the test."""

    def take_out(who: str) -> None:
        tokens = {name: token for name, token in TOKENS.items() if name != who}
        write_tokens(place.folder / "tokens", tokens)

    yield take_out
    write_tokens(place.folder / "tokens", TOKENS)


@pytest.mark.parametrize("over_tcp", [False, True], ids=["line", "call"])
def test_a_student_whose_token_is_taken_out_amid_a_wait_is_told_that_its_session_ended(
    place: Guarded, without: Without, over_tcp: bool
) -> None:
    ids, lengths, _ = some_rows(0)
    transports = (tl.Transport.STREAM,) if over_tcp else (tl.Transport.SHARED_MEMORY,)
    asked = metric_of(place.view(), LINE_CALLS, call="want_steps")

    def is_waiting(view: ServerView) -> bool:
        if over_tcp:  # beside the operator's own call
            return metric_of(view, "teacher_logits_rpcs_in_flight") > 1
        return metric_of(view, LINE_CALLS, call="want_steps") > asked

    with (
        place.connect("pool") as pool,
        pool.open_publisher(a_teacher("left")),
        place.connect("bob", over_tcp=over_tcp) as client,
        client.open_session(a_student("left", transports=transports)) as session,
        ThreadPoolExecutor(1) as aside,
    ):
        waiting = aside.submit(
            session.acquire, step=0, input_ids=ids, lengths=lengths, timeout=SECONDS
        )
        place.wait_for(is_waiting)
        without("bob")
        with pytest.raises(SessionExpiredError):
            waiting.result()
    assert "session ended: its caller is known no more" in place.server.log_text()


def test_what_it_holds_stays_right_and_is_free_once_it_lets_go(
    place: Guarded, without: Without
) -> None:
    with (
        place.connect("bob") as client,
        client.open_session(a_profile(teacher_id="teacher")) as session,
    ):
        payload = session.score(ROWS).result(timeout=SECONDS)
        before = {name: column.clone() for name, column in payload.columns.items()}
        without("bob")
        place.wait_for(lambda view: {each.state for each in view.sessions} == {"closed"})
        assert all(torch.equal(payload.columns[name], before[name]) for name in before)
        with pytest.raises((SessionExpiredError, UnknownCallerError)):
            session.score(ROWS).result(timeout=SECONDS)
        payload.close()
    place.wait_for(lambda view: not view.sessions and not view.leases)


def test_a_publisher_whose_token_is_taken_out_leaves_what_it_sealed(
    place: Guarded, without: Without
) -> None:
    ids, lengths, logits = some_rows(0)
    with (
        place.connect("pool") as pool,
        pool.open_publisher(a_teacher("sealed")) as teacher,
        place.connect("alice") as client,
        client.open_session(a_student("sealed")) as session,
    ):
        with teacher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            tl.select_top_k(logits, out=draft)
        without("pool")
        place.wait_for(lambda view: {(e.kind, e.state) for e in view.sessions} == HALF)
        with pytest.raises((SessionExpiredError, UnknownCallerError)):
            teacher.reserve(1, input_ids=ids, lengths=lengths)
        with session.acquire(step=0, input_ids=ids, lengths=lengths) as batch:
            assert same(batch.columns, expected(ids, lengths, logits))


def test_another_token_of_its_name_keeps_a_session(place: Guarded) -> None:
    changed = {"bob": "bob-of-tomorrow-0123456789", "ops": TOKENS["ops"]}
    profile = a_profile(teacher_id="teacher")
    with (
        place.connect("alice") as other,
        other.open_session(profile),
        place.connect("bob") as client,
        client.open_session(profile) as session,
    ):
        write_tokens(place.folder / "tokens", changed)
        try:
            place.wait_for(lambda view: {each.state for each in view.sessions} == CLOSED_ONE)
            with pytest.raises(UnknownCallerError):
                session.score(ROWS).result(timeout=SECONDS)
        finally:
            write_tokens(place.folder / "tokens", TOKENS)
        session.score(ROWS).result(timeout=SECONDS).close()
