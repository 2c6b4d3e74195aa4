"""The newest client against a server that speaks the first release's schema alone."""

from collections.abc import Iterator

import grpc
import pytest
from tests.client.publishing.a_publisher import a_student, a_teacher, expected, some_rows
from tests.client.publishing.test_publisher import same
from tests.compat.first_server import FirstServer, first_server
from tests.transport_suite.dense_teacher import DenseTeacher
from tests.transport_suite.right import RAGGED, assert_right
from tests.transport_suite.writing import a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits.addresses import read_address
from teacher_logits.errors import SessionRefusedError
from teacher_logits_client import Transport
from teacher_logits_client.calls.inspection import inspect_server

BOTH_WAYS = pytest.mark.parametrize(
    "way", [Transport.SHARED_MEMORY, Transport.STREAM], ids=lambda way: str(way.value)
)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FirstServer, str]]:
    folder = tmp_path_factory.mktemp("first")
    with embedded_server(folder, pool_bytes=4 << 20, engine=DenseTeacher()) as server:
        with first_server(server.address, folder) as running:
            yield running


@pytest.fixture
def client(first: tuple[FirstServer, str]) -> Iterator[tl.Client]:
    with tl.connect(first[1]) as connected:
        yield connected


@BOTH_WAYS
def test_it_has_rows_scored_and_reads_them(client: tl.Client, way: Transport) -> None:
    profile = a_profile(teacher_id="teacher", top_k=8, transports=(way,))
    with client.open_session(profile) as session, session.score(RAGGED).result() as leased:
        assert leased.transport is way
        assert_right(leased, RAGGED)


def test_it_agrees_on_the_first_release_s_version_and_no_feature(
    first: tuple[FirstServer, str], client: tl.Client
) -> None:
    before = first[0].dropped
    with client.open_session(a_profile(teacher_id="teacher", top_k=8)) as session:
        assert (session.terms.protocol_version, session.terms.features) == (1, frozenset())
    assert first[0].dropped > before  # something newer was said, and was not heard


@BOTH_WAYS
def test_it_publishes_steps_and_reads_them(client: tl.Client, way: Transport) -> None:
    name = f"newest-{way.value}"
    with client.open_publisher(a_teacher(name), transports=(way.value,)) as publisher:
        profile = a_student(name, transports=(way,))
        with client.open_session(profile) as session:
            assert session.transport is way
            for step in range(3):
                ids, lengths, logits = some_rows(step)
                with publisher.reserve(step, input_ids=ids, lengths=lengths) as draft:
                    tl.select_top_k(logits, out=draft)
                with session.acquire(step=step, input_ids=ids, lengths=lengths) as batch:
                    assert same(batch.columns, expected(ids, lengths, logits))


def test_its_refusals_come_with_their_rules(client: tl.Client) -> None:
    with pytest.raises(SessionRefusedError) as refusal:
        client.open_session(a_profile(teacher_id="teacher", top_k=1 << 20))
    assert [each.rule for each in refusal.value.violations] == ["top_k_too_large"]


def test_it_sees_what_the_server_holds(first: tuple[FirstServer, str], client: tl.Client) -> None:
    with client.open_session(a_profile(teacher_id="teacher", top_k=8)) as session:
        seen = inspect_server(read_address(first[1], what="address"), timeout=20)
        assert session.terms.session_id in [each.session_id for each in seen.sessions]


def test_an_rpc_that_the_first_release_had_not_is_unimplemented(
    first: tuple[FirstServer, str],
) -> None:
    with grpc.insecure_channel(first[1]) as channel:
        call = channel.unary_unary("/teacher_logits.v1.OperatorService/Later", bytes, bytes)
        with pytest.raises(grpc.RpcError) as refusal:
            call(b"", timeout=20)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
