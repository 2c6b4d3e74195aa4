"""Bad scoring requests and bad returns: a typed error with its numbers, and nothing is lost.

What a client of ours refuses before it sends it is sent here by a plain stub, so that the server
is tried too. After each test the server must answer a good request and hold no room.
"""

from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

import grpc
import pytest
import torch
from tests.reports.conftest import POOL_BYTES, Tried
from tests.reports.raw import (
    OUR_METHODS,
    REJECT,
    SESSION_METHODS,
    TIMEOUT_SECONDS,
    a_request,
    ids,
    refused,
)
from tests.transport_suite.dense_teacher import MAX_ROW_TOKENS, VOCABULARY_SIZE
from tests.transport_suite.right import RAGGED
from tests.transport_suite.writing import a_profile

import teacher_logits_client as tl
from teacher_logits.errors import (
    EpochChangedError,
    LeaseLostError,
    NotAllowedError,
    PayloadInvalidError,
    RequestInvalidError,
    SessionExpiredError,
    TeacherLogitsError,
)
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.v1 import (
    bulk_service_pb2,
    payload_pb2,
    teacher_logits_service_pb2,
)
from teacher_logits.wire import student_to_wire
from teacher_logits_client import Transport
from teacher_logits_client.line import Line

Code = grpc.StatusCode
Fields: TypeAlias = dict[str, object]
MAX_REQUEST_TOKENS = 65536


@pytest.fixture
def session(tried: Tried) -> Iterator[tl.Session]:
    profile = a_profile(top_k=64, transports=(Transport.STREAM,))
    with tried.client.open_session(profile) as opened:
        yield opened


ROW_TOO_LONG = MAX_ROW_TOKENS + 1
ROWS_TOO_MANY = MAX_REQUEST_TOKENS // MAX_ROW_TOKENS
#: 64 entries of 6 bytes a position: more than the pool has.
TOO_LARGE = 4 * MAX_ROW_TOKENS

#: What is sent, and the numbers of the refusal.
SENT: dict[str, tuple[Fields, Fields]] = {
    "an empty batch": ({"row_lengths": [], "input_ids": b""}, {}),
    "an empty row": (
        {"row_lengths": [3, 0]},
        {"row": 1, "length": 0},
    ),
    "a negative length": ({"row_lengths": [4, -1]}, {"row": 1, "length": -1}),
    "lengths longer than the ids": (
        {"row_lengths": [2, 2]},
        {"tokens": 4, "expected_bytes": 16, "size_bytes": 12},
    ),
    "lengths shorter than the ids": (
        {"row_lengths": [1, 1]},
        {"tokens": 2, "expected_bytes": 8, "size_bytes": 12},
    ),
    "half an id": ({"input_ids": ids(1, 2, 3)[:-1]}, {"size_bytes": 11}),
    "lengths that overflow together": (
        {"row_lengths": [2**31 - 1] * 3},
        {"tokens": 3 * (2**31 - 1)},
    ),
    "an id of the size of the vocabulary": (
        {"input_ids": ids(1, 2, VOCABULARY_SIZE)},
        {"row": 1, "position": 0, "token_id": VOCABULARY_SIZE, "vocabulary_size": VOCABULARY_SIZE},
    ),
    "an id of the head's padding": (
        {"input_ids": ids(1, VOCABULARY_SIZE + 9, 2)},
        {"row": 0, "position": 1, "token_id": VOCABULARY_SIZE + 9},
    ),
    "an ignored label as an id": (
        {"input_ids": ids(1, -100, 2)},
        {"row": 0, "position": 1, "token_id": -100},
    ),
    "a row longer than the teacher reads": (
        {"input_ids": bytes(4 * (ROW_TOO_LONG + 1)), "row_lengths": [1, ROW_TOO_LONG]},
        {"row": 1, "tokens": ROW_TOO_LONG, "limit": MAX_ROW_TOKENS},
    ),
    "a row too long with its prefix": (
        {
            "input_ids": bytes(4 * MAX_ROW_TOKENS),
            "row_lengths": [MAX_ROW_TOKENS],
            "prefix_ids": ids(5),
            "prefix_lengths": [1],
        },
        {"row": 0, "tokens": MAX_ROW_TOKENS, "prefix": 1, "limit": MAX_ROW_TOKENS},
    ),
    "more tokens than one request may have": (
        {
            "input_ids": bytes(4 * (MAX_REQUEST_TOKENS + 1)),
            "row_lengths": [MAX_ROW_TOKENS] * ROWS_TOO_MANY + [1],
        },
        {"tokens": MAX_REQUEST_TOKENS + 1, "limit": MAX_REQUEST_TOKENS},
    ),
    "a payload larger than the whole pool": (
        {"input_ids": bytes(4 * TOO_LARGE), "row_lengths": [MAX_ROW_TOKENS] * 4},
        {"budget_bytes": POOL_BYTES},
    ),
    "a window past its row": (
        {"row_windows": [0, 2, 0, 2]},
        {"row": 1, "tokens": 1, "first": 0, "count": 2},
    ),
    "a window before its row": (
        {"row_windows": [-1, 1, 0, 1]},
        {"row": 0, "tokens": 2, "first": -1, "count": 1},
    ),
    "a window of fewer than none": (
        {"row_windows": [1, -1, 0, 1]},
        {"row": 0, "tokens": 2, "first": 1},
    ),
    "a window that overflows": (
        {"row_windows": [2**31 - 1, 2**31 - 1, 0, 1]},
        {"row": 0, "first": 2**31 - 1},
    ),
    "half a window": ({"row_windows": [0, 1, 0]}, {"entries": 3}),
    "a window too few": ({"row_windows": [0, 1]}, {"entries": 1, "rows": 2}),
    "a prefix too few": (
        {"prefix_lengths": [1], "prefix_ids": ids(1)},
        {"entries": 1, "rows": 2},
    ),
    "a prefix of fewer than none": (
        {"prefix_lengths": [2, -1], "prefix_ids": ids(1)},
        {"row": 1, "length": -1},
    ),
    "a prefix outside the vocabulary": (
        {"prefix_lengths": [0, 1], "prefix_ids": ids(VOCABULARY_SIZE)},
        {"row": 1, "position": 0, "token_id": VOCABULARY_SIZE},
    ),
    "a prefix that is not there": ({"prefix_lengths": [1, 1]}, {"tokens": 2, "size_bytes": 0}),
}


@pytest.mark.parametrize("name", SENT)
def test_the_server_refuses_with_the_numbers_and_computes_nothing(
    tried: Tried, session: tl.Session, name: str
) -> None:
    given, facts = SENT[name]
    passes = tried.teacher.passes
    slabs = tried.server.usage.committed_bytes
    request = a_request(session.terms.session_id, **given)
    answer = refused(lambda: tried.raw.scoring.Score(request, timeout=TIMEOUT_SECONDS))
    assert isinstance(answer.error, PayloadInvalidError)
    assert answer.code is Code.INVALID_ARGUMENT
    assert facts.items() <= answer.error.facts.items()
    for number in facts.values():
        assert str(number) in answer.error.message
    assert tried.teacher.passes == passes
    assert tried.server.usage.committed_bytes == slabs


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"bad_rows": 0}, RequestInvalidError),
        ({"bad_rows": 99}, RequestInvalidError),
        ({"request_id": ""}, RequestInvalidError),
        ({"request_id": "two words"}, RequestInvalidError),
        ({"request_id": "x" * 5000}, RequestInvalidError),
        ({"session_id": ""}, SessionExpiredError),
        ({"session_id": "nobody"}, SessionExpiredError),
        ({"session_id": "s-000000000000-gone"}, EpochChangedError),
        ({"session_id": "x" * 100_000}, SessionExpiredError),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_request_that_names_the_wrong_things_is_refused(
    tried: Tried, session: tl.Session, given: Fields, kind: type[TeacherLogitsError]
) -> None:
    request = a_request(session.terms.session_id, **given)
    answer = refused(lambda: tried.raw.scoring.Score(request, timeout=TIMEOUT_SECONDS))
    assert isinstance(answer.error, kind)


CALLER = pytest.mark.parametrize(
    ("call", "facts"),
    [
        ({"input_ids": torch.zeros(2, 3).long(), "lengths": [3, 4]}, {"length": 4, "width": 3}),
        ({"input_ids": torch.zeros(2, 3).long(), "lengths": [0, 3]}, {"row": 0, "length": 0}),
        ({"input_ids": torch.zeros(2, 3).long(), "lengths": [3]}, {"rows": 2, "lengths": 1}),
        ({"input_ids": torch.zeros(0, 3).long()}, {"rows": 0}),
        ({"input_ids": []}, {"rows": 0}),
        ({"input_ids": [[1], []]}, {"row": 1, "length": 0}),
        ({"input_ids": [[1], [VOCABULARY_SIZE]]}, {"row": 1, "token_id": VOCABULARY_SIZE}),
        ({"input_ids": [[-1]]}, {"row": 0, "token_id": -1}),
        ({"input_ids": [[2**40]]}, {"row": 0, "token_id": 2**40}),
        ({"input_ids": [[0.5]]}, {"dtype": "float32"}),
        ({"input_ids": torch.zeros(3).long()}, {"axes": 1}),
        ({"input_ids": [[1]], "windows": [[0, 2]]}, {"row": 0, "count": 2, "length": 1}),
        (
            {"input_ids": torch.zeros(17, 4096).long()},
            {"tokens": 17 * 4096, "limit": MAX_REQUEST_TOKENS},
        ),
    ],
    ids=lambda each: str(list(each.values())[-1])[:30],
)


@CALLER
def test_a_caller_of_ours_is_refused_before_anything_is_sent(
    tried: Tried, session: tl.Session, call: Fields, facts: Fields
) -> None:
    with pytest.raises(PayloadInvalidError) as caught:
        session.score(**call)  # type: ignore[arg-type]
    assert facts.items() <= caught.value.facts.items()


def test_a_session_that_proved_nothing_yet_may_do_nothing(tried: Tried) -> None:
    profile = a_profile(top_k=8, transports=(Transport.STREAM,))
    request = teacher_logits_service_pb2.OpenSessionRequest(
        request_id="unsettled",
        protocol_version=PROTOCOL_VERSION,
        profile=student_to_wire(profile),
    )
    opened = tried.raw.student.OpenSession(request, timeout=TIMEOUT_SECONDS)
    session_id = opened.session.session_id
    for method in SESSION_METHODS:
        if method.descriptor.name in ("ProveLocality", "CloseSession", "ReleasePayload"):
            continue
        data = every_field(session_id, payload_id="p-x-y", request=method.request)
        answer = refused(partial(tried.raw.send, method, data))
        assert isinstance(answer.error, NotAllowedError), method.path
        assert answer.code is Code.PERMISSION_DENIED
    close = teacher_logits_service_pb2.CloseSessionRequest(session_id=session_id)
    tried.raw.student.CloseSession(close, timeout=TIMEOUT_SECONDS)


def every_field(session_id: str, *, payload_id: str, request: object) -> bytes:
    """Fill a request with all that any of them may need."""
    message = request(  # type: ignore[operator]
        session_id=session_id,
        request_id="r",
        input_ids=ids(1),
        row_lengths=[1],
        bad_rows=REJECT,
        payload_id=payload_id,
        lease_id="l",
    )
    data: bytes = message.SerializeToString()
    return data


def test_ids_of_an_older_server_are_refused_at_every_rpc_and_on_the_line(tried: Tried) -> None:
    old = "s-0123456789ab-AAAAAAAAAAAAAAAAAAAAAA"
    epoch = tried.server.core.ledger.epoch
    for method in SESSION_METHODS:
        data = every_field(old, payload_id="p", request=method.request)
        answer = refused(partial(tried.raw.send, method, data))
        assert isinstance(answer.error, EpochChangedError), method.path
        assert answer.code is Code.FAILED_PRECONDITION
        assert answer.error.facts == {"epoch": epoch, "stale_epoch": "0123456789ab"}
    # OpenSession, OpenPublisher and Inspect name none, and Reclaim does not speak for one.
    assert len(SESSION_METHODS) == len(OUR_METHODS) - 4
    line = Line(broker_of(tried), timeout=TIMEOUT_SECONDS)
    with pytest.raises(EpochChangedError, match="restarted"):
        line.hello(old, bytes(32), timeout=TIMEOUT_SECONDS)
    line.close()


def broker_of(tried: Tried) -> str:
    broker = tried.server.core.broker
    assert broker is not None
    return broker.path


def test_a_payload_of_an_older_server_is_gone_and_its_reader_goes_on(
    tried: Tried, session: tl.Session
) -> None:
    with pytest.raises(EpochChangedError, match=r"payload .*0123456789ab"):
        session.acquire(payload_id="p-0123456789ab-AAAAAAAAAAAAAAAAAAAAAA")
    session.score(RAGGED).result().close()


# Leases that come back wrongly


@pytest.fixture
def lease(tried: Tried, session: tl.Session) -> payload_pb2.Lease:
    """A lease that nobody but the test gives back."""
    request = a_request(session.terms.session_id, request_id="leased")
    return tried.raw.scoring.Score(request, timeout=TIMEOUT_SECONDS).lease


def release(tried: Tried, session_id: str, lease_id: str) -> None:
    request = teacher_logits_service_pb2.ReleasePayloadRequest(
        session_id=session_id, lease_id=lease_id
    )
    tried.raw.student.ReleasePayload(request, timeout=TIMEOUT_SECONDS)


def test_a_lease_returned_twice_frees_its_room_once(
    tried: Tried, session: tl.Session, lease: payload_pb2.Lease
) -> None:
    session_id = session.terms.session_id
    used = tried.server.usage.used_bytes
    release(tried, session_id, lease.lease_id)
    assert tried.server.usage.used_bytes < used
    with session.score(RAGGED).result() as other:
        digest = other.digest()
        used = tried.server.usage.used_bytes
        release(tried, session_id, lease.lease_id)
        assert tried.server.usage.used_bytes == used
        assert other.digest() == digest


def test_a_lease_returned_after_its_sessions_end_is_too_late_and_no_harm(
    tried: Tried, session: tl.Session, lease: payload_pb2.Lease
) -> None:
    session.close()
    tried.server.wait_until(lambda: tried.server.usage.used_bytes == 0)
    answer = refused(lambda: release(tried, session.terms.session_id, lease.lease_id))
    assert isinstance(answer.error, SessionExpiredError)
    assert answer.code is Code.ABORTED


def test_a_lease_is_not_returned_nor_read_by_another_session(
    tried: Tried, session: tl.Session, lease: payload_pb2.Lease
) -> None:
    profile = a_profile(top_k=64, transports=(Transport.STREAM,))
    with tried.client.open_session(profile) as thief:
        thiefs_id = thief.terms.session_id
        used = tried.server.usage.used_bytes
        for call in (
            lambda: release(tried, thiefs_id, lease.lease_id),
            lambda: read(tried, thiefs_id, lease.lease_id),
        ):
            answer = refused(call)
            assert isinstance(answer.error, NotAllowedError)
            assert answer.code is Code.PERMISSION_DENIED
        assert tried.server.usage.used_bytes == used
    assert len(read(tried, session.terms.session_id, lease.lease_id)) == lease.payload.size_bytes
    release(tried, session.terms.session_id, lease.lease_id)


def test_a_lease_that_never_was_is_nothing_to_return_and_cannot_be_read(
    tried: Tried, session: tl.Session
) -> None:
    epoch = tried.server.core.ledger.epoch
    for never in ("", "l", f"l-{epoch}-AAAA", "x" * 10_000):
        release(tried, session.terms.session_id, never)
        answer = refused(partial(read, tried, session.terms.session_id, never))
        assert isinstance(answer.error, LeaseLostError)
        assert answer.code is Code.ABORTED


@pytest.mark.parametrize("offset", [-1, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_a_stream_that_starts_outside_its_payload_is_refused_with_both_numbers(
    tried: Tried, session: tl.Session, lease: payload_pb2.Lease, offset: int
) -> None:
    session_id = session.terms.session_id
    answer = refused(lambda: read(tried, session_id, lease.lease_id, offset=offset))
    assert isinstance(answer.error, RequestInvalidError)
    size = lease.payload.size_bytes
    assert answer.error.facts == {"offset_bytes": offset, "size_bytes": size}
    assert read(tried, session_id, lease.lease_id, offset=size) == b""
    release(tried, session_id, lease.lease_id)


def read(tried: Tried, session_id: str, lease_id: str, *, offset: int = 0) -> bytes:
    request = bulk_service_pb2.ReadPayloadRequest(
        session_id=session_id, lease_id=lease_id, offset_bytes=offset
    )
    chunks = tried.raw.bulk.ReadPayload(request, timeout=TIMEOUT_SECONDS)
    return b"".join(chunk.data for chunk in chunks)
