"""The error tree on the wire: every class comes back as itself, and none is ever lost."""

from __future__ import annotations

import math
from concurrent import futures
from datetime import timedelta
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from teacher_logits.errors import (
    GridMismatchError,
    NotNodeLocalError,
    PoolFullError,
    SessionRefusedError,
    TeacherLogitsError,
    Violation,
)
from teacher_logits.wire import errors as wire_errors
from teacher_logits.wire.errors import (
    BY_REASON,
    DETAILS_KEY,
    DOMAIN,
    MAX_STATUS_BYTES,
    code_of,
    from_status,
    to_status,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from teacher_logits import errors

TREE = list(wire_errors.tree())
RULE_ERRORS = [SessionRefusedError, GridMismatchError, NotNodeLocalError]
#: What people see first: the status codes.
CODES = {
    "TeacherLogitsError": "INTERNAL",
    "ContractViolation": "FAILED_PRECONDITION",
    "SessionRefusedError": "FAILED_PRECONDITION",
    "GridMismatchError": "INVALID_ARGUMENT",
    "NotNodeLocalError": "FAILED_PRECONDITION",
    "RequestInvalidError": "INVALID_ARGUMENT",
    "PayloadInvalidError": "INVALID_ARGUMENT",
    "AlignmentError": "FAILED_PRECONDITION",
    "UnknownTeacherError": "NOT_FOUND",
    "ConfigError": "FAILED_PRECONDITION",
    "ForkedClientError": "FAILED_PRECONDITION",
    "NoCommonTransportError": "FAILED_PRECONDITION",
    "PayloadConflictError": "ALREADY_EXISTS",
    "NotAllowedError": "PERMISSION_DENIED",
    "UnknownCallerError": "UNAUTHENTICATED",
    "StaleReference": "ABORTED",
    "EpochChangedError": "FAILED_PRECONDITION",
    "SessionExpiredError": "ABORTED",
    "LeaseLostError": "ABORTED",
    "ReservationLapsedError": "ABORTED",
    "StalePayloadError": "ABORTED",
    "NotAvailable": "UNAVAILABLE",
    "PayloadRetiredError": "NOT_FOUND",
    "ProducerLostError": "NOT_FOUND",
    "DeadlinePassedError": "DEADLINE_EXCEEDED",
    "PoolFullError": "RESOURCE_EXHAUSTED",
    "LimitReachedError": "RESOURCE_EXHAUSTED",
    "HostCopyNeededError": "FAILED_PRECONDITION",
    "DrainingError": "UNAVAILABLE",
    "ServerUnreachableError": "UNAVAILABLE",
    "EngineError": "INTERNAL",
    "TransportFailure": "UNAVAILABLE",
    "SlabOpenError": "UNAVAILABLE",
    "StreamBrokenError": "UNAVAILABLE",
    "ObjectLostError": "UNAVAILABLE",
    "ChecksumError": "UNAVAILABLE",
}

names = st.from_regex(r"[a-z][a-z_]{0,15}", fullmatch=True)
values = st.integers() | st.floats(allow_nan=False) | st.text(max_size=40)
facts = st.dictionaries(names, values, max_size=4)
violations = st.lists(
    st.builds(Violation, rule=names, message=st.text(max_size=40), facts=facts),
    min_size=1,
    max_size=3,
)
retries = st.none() | st.timedeltas(timedelta(0), timedelta(days=1))


def sent(error: BaseException) -> TeacherLogitsError:
    """The error as it comes out at the other end."""
    there = from_status(status_pb2.Status.FromString(to_status(error).SerializeToString()))
    assert there is not None
    return there


def refusal(count: int, *, message: str = "too small", rule: str = "not_positive") -> Violation:
    return Violation(
        rule=rule, message=f"{message} {count}", facts={"size": count, f"size_{count}": count}
    )


class TestTheTree:
    def test_is_walked_whole(self) -> None:
        assert {kind.__name__ for kind in TREE} == set(CODES)

    @pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
    def test_has_a_code_for_every_class(self, kind: type[TeacherLogitsError]) -> None:
        violation = Violation(rule="dp_mismatch", message="")
        error = kind([violation]) if kind in RULE_ERRORS else kind("")

        assert code_of(error).name == CODES[kind.__name__]

    @pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
    def test_has_a_reason_for_every_class(self, kind: type[TeacherLogitsError]) -> None:
        assert BY_REASON[kind.reason] is kind

    @pytest.mark.parametrize(
        ("rule", "code"),
        [
            ("not_positive", "INVALID_ARGUMENT"),
            ("gbs_mismatch", "INVALID_ARGUMENT"),
            ("student_dp_indivisible", "INVALID_ARGUMENT"),
            ("teacher_dp_indivisible", "INVALID_ARGUMENT"),
            ("student_mbs_indivisible", "INVALID_ARGUMENT"),
            ("teacher_mbs_indivisible", "INVALID_ARGUMENT"),
            ("rank_out_of_range", "INVALID_ARGUMENT"),
            ("dp_mismatch", "FAILED_PRECONDITION"),
            ("vocab_mismatch", "FAILED_PRECONDITION"),
            ("not_proven_local", "FAILED_PRECONDITION"),
        ],
    )
    def test_gives_a_refusal_the_code_of_its_first_rule(self, rule: str, code: str) -> None:
        second = Violation(rule="tokenizer_mismatch", message="")

        error = SessionRefusedError([Violation(rule=rule, message=""), second])

        assert code_of(error).name == code


@pytest.mark.parametrize(
    "kind", [k for k in TREE if k not in RULE_ERRORS], ids=lambda kind: kind.__name__
)
@settings(max_examples=10)
@given(message=st.text(max_size=100), facts=facts, retry_after=retries)
def test_every_class_comes_back_as_itself(
    kind: type[TeacherLogitsError],
    message: str,
    facts: dict[str, errors.Fact],
    retry_after: timedelta | None,
) -> None:
    error = kind(message, facts=facts, retry_after=retry_after)

    there = sent(error)

    assert type(there) is kind
    assert vars(there) == vars(error)
    assert str(there) == message


@pytest.mark.parametrize("kind", RULE_ERRORS)
@settings(max_examples=40)
@given(violations=violations, retry_after=retries)
def test_every_refusal_comes_back_with_every_rule(
    kind: type[SessionRefusedError],
    violations: list[Violation],
    retry_after: timedelta | None,
) -> None:
    error = kind(violations)
    error.retry_after = retry_after

    there = sent(error)

    assert type(there) is kind
    assert vars(there) == vars(error)


@pytest.mark.parametrize(
    "value",
    [
        0,
        -7,
        10**30,
        0.7,
        1e-30,
        -0.0,
        math.inf,
        "12",
        "0.5",
        "1e5",
        "inf",
        '"',
        '"12"',
        "",
        "-",
        "é",
    ],
)
def test_a_fact_comes_back_as_what_it_was(value: errors.Fact) -> None:
    there = sent(PoolFullError("", facts={"value": value})).facts["value"]

    assert there == value
    assert type(there) is type(value)


def test_a_fact_comes_back_under_its_name_whatever_that_is() -> None:
    assert sent(PoolFullError("", facts={"a-1": 2})).facts == {"a-1": 2}


def test_not_a_number_comes_back_as_a_number() -> None:
    there = sent(PoolFullError("", facts={"value": math.nan})).facts["value"]

    assert isinstance(there, float)
    assert math.isnan(there)


class TestSize:
    def test_five_hundred_rules_and_a_long_message_keep_code_and_first_rules(self) -> None:
        error = SessionRefusedError(
            [
                refusal(0, message="x" * 20_000),
                *(refusal(n, rule="dp_mismatch") for n in range(1, 500)),
            ]
        )

        status = to_status(error)
        there = sent(error)

        assert status.ByteSize() <= MAX_STATUS_BYTES
        assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert isinstance(there, SessionRefusedError)
        shown = there.violations
        assert shown[0].rule == "not_positive"
        assert shown[1] == error.violations[1]
        assert there.facts["violations_left_out"] == 500 - len(shown)
        assert str(there).endswith("; and 499 more")

    def test_a_message_names_whole_rules_and_how_many_more(self) -> None:
        error = SessionRefusedError([refusal(n) for n in range(100)])

        message = str(sent(error))

        whole = message.split("; ")
        assert whole[0] == "not_positive: too small 0"
        assert whole[-2] == f"not_positive: too small {len(whole) - 2}"
        assert whole[-1] == f"and {100 - len(whole) + 1} more"

    @given(
        message=st.text(max_size=3000),
        facts=st.dictionaries(st.text(max_size=300), st.text(max_size=1000), max_size=60),
    )
    def test_nothing_that_an_error_says_is_too_much(
        self, message: str, facts: dict[str, errors.Fact]
    ) -> None:
        error = PoolFullError(message, facts=facts, retry_after=timedelta(seconds=1))

        assert to_status(error).ByteSize() <= MAX_STATUS_BYTES
        assert type(sent(error)) is PoolFullError

    @given(
        st.lists(
            st.builds(
                Violation,
                rule=st.text(max_size=200),
                message=st.text(max_size=800),
                facts=st.dictionaries(st.text(max_size=100), st.text(max_size=300), max_size=5),
            ),
            min_size=1,
            max_size=40,
        )
    )
    def test_nothing_that_rules_say_is_too_much(self, violations: list[Violation]) -> None:
        error = SessionRefusedError(violations)
        error.retry_after = timedelta(seconds=1)

        assert to_status(error).ByteSize() <= MAX_STATUS_BYTES
        assert type(sent(error)) is SessionRefusedError

    def test_the_facts_that_fit_are_the_first_rules(self) -> None:
        error = SessionRefusedError([refusal(n) for n in range(500)])

        there = sent(error)

        assert there.facts["size"] == 0
        assert there.facts["size_0"] == 0
        assert isinstance(there, SessionRefusedError)
        assert there.violations[1].facts == {"size": 1, "size_1": 1}

    @pytest.mark.parametrize("text", ["\ud800", "a\0b", "\udcff" * 1000])
    def test_text_that_is_no_text_does_not_hide_the_error(self, text: str) -> None:
        error = PoolFullError(text, facts={text: text})

        assert type(sent(error)) is PoolFullError


class TestWhatIsNotOfTheTree:
    @pytest.mark.parametrize(
        "error", [ValueError("the password is 1234"), KeyboardInterrupt(), MemoryError("1234")]
    )
    def test_becomes_internal_and_tells_nothing_of_itself(self, error: BaseException) -> None:
        status = to_status(error)

        assert status.code == grpc.StatusCode.INTERNAL.value[0]
        assert b"1234" not in status.SerializeToString()

    def test_is_no_status_of_ours(self) -> None:
        assert from_status(status_pb2.Status(code=5, message="somebody else's")) is None

    def test_is_another_domains_status(self) -> None:
        status = status_pb2.Status(code=5)
        info = error_details_pb2.ErrorInfo(reason="POOL_FULL", domain="example.org")
        status.details.add().Pack(info)

        assert from_status(status) is None

    def test_is_a_status_that_cannot_be_read(self) -> None:
        status = to_status(PoolFullError("full"))
        status.details[0].value = b"\xff\xff\xff"

        assert from_status(status) is None

    def test_a_reason_of_tomorrow_is_still_an_error_of_ours(self) -> None:
        status = status_pb2.Status(code=5, message="new")
        info = error_details_pb2.ErrorInfo(reason="OF_TOMORROW", domain=DOMAIN)
        status.details.add().Pack(info)

        there = from_status(status)

        assert type(there) is TeacherLogitsError
        assert str(there) == "new"

    def test_a_refusal_without_its_rules_is_still_a_refusal(self) -> None:
        status = to_status(SessionRefusedError([refusal(1)]))
        kept = [d for d in status.details if not d.Is(error_details_pb2.BadRequest.DESCRIPTOR)]
        bare = status_pb2.Status(code=status.code, message=status.message)
        bare.details.extend(any_pb2.Any.FromString(d.SerializeToString()) for d in kept)

        there = from_status(bare)

        assert isinstance(there, SessionRefusedError)
        assert there.violations[0].rule == "unknown"
        assert str(there) == status.message


class Refusing(grpc.GenericRpcHandler):
    """A server that answers every call with one error."""

    error: TeacherLogitsError

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        status = to_status(self.error)
        context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
        context.abort(code_of(self.error), status.message)


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[tuple[Refusing, grpc.Channel]]:
    handler = Refusing()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1), handlers=[handler])
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    server.start()
    with grpc.insecure_channel(address) as channel:
        yield handler, channel
    server.stop(None).wait()


def call_any(channel: grpc.Channel) -> bytes:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/any/Call")
    return call(b"", timeout=30)


@pytest.mark.parametrize(
    "error",
    [
        SessionRefusedError([refusal(n, message="ä" * 20_000) for n in range(500)]),
        SessionRefusedError([refusal(n) for n in range(500)]),
        PoolFullError("\u6f22" * 20_000, facts={f"n{n}": "\u6f22" * 500 for n in range(500)}),
    ],
    ids=["long rules", "many rules", "long message and facts"],
)
def test_the_largest_status_comes_through_grpc(
    refusing: tuple[Refusing, grpc.Channel], error: TeacherLogitsError
) -> None:
    handler, channel = refusing
    handler.error = error

    with pytest.raises(grpc.RpcError) as caught:
        call_any(channel)

    call = caught.value
    assert isinstance(call, grpc.Call)
    assert call.code() is code_of(error)
    (details,) = [v for k, v in call.trailing_metadata() or () if k == DETAILS_KEY]
    there = from_status(status_pb2.Status.FromString(bytes(details)))
    assert type(there) is type(error)
