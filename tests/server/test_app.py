"""A whole server in a thread of the tests' process, called with plain gRPC stubs."""

from __future__ import annotations

import array
import logging
import os
import pickle
import stat
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import grpc
import pytest
import torch
from google.rpc import status_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from tests.held import left_behind, open_descriptors, running_threads

from teacher_logits import inprocess, keys
from teacher_logits.clock import MonotonicClock
from teacher_logits.errors import (
    AlignmentError,
    ConfigError,
    DeadlinePassedError,
    DrainingError,
    EpochChangedError,
    LeaseLostError,
    NotAllowedError,
    PayloadInvalidError,
    RequestInvalidError,
    SessionExpiredError,
    SessionRefusedError,
    TeacherLogitsError,
)
from teacher_logits.grid import BatchGrid
from teacher_logits.layout import ColumnKind
from teacher_logits.profiles import PROTOCOL_VERSION, StudentProfile
from teacher_logits.tensors import column_tensor
from teacher_logits.transport import Transport, proof_of
from teacher_logits.v1 import (
    bulk_service_pb2,
    bulk_service_pb2_grpc,
    operator_service_pb2,
    operator_service_pb2_grpc,
    scoring_service_pb2,
    scoring_service_pb2_grpc,
)
from teacher_logits.v1 import teacher_logits_service_pb2 as messages
from teacher_logits.v1 import teacher_logits_service_pb2_grpc as stubs
from teacher_logits.wire import student_to_wire, transport_to_wire
from teacher_logits.wire.errors import DETAILS_KEY, from_status
from teacher_logits.wire.payloads import lease_from_wire
from teacher_logits_server.app import EmbeddedServer, serve_in_thread
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import EngineProfile, Row
from teacher_logits_server.listening import log_addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from teacher_logits.terms import LeaseTerms

PATIENCE = 30.0
VOCABULARY = 96

RPCS = {
    "TeacherLogitsService": (
        "OpenSession",
        "ProveLocality",
        "RenewSession",
        "CloseSession",
        "AcquirePayload",
        "AcquireStep",
        "ReleasePayload",
    ),
    "RegistryService": ("OpenPublisher", "ReservePayload", "SealPayload", "AbandonPayload"),
    "ScoringService": ("Score",),
    "BulkService": ("ReadPayload",),
    "OperatorService": ("Inspect",),
}
METHODS = [f"/teacher_logits.v1.{service}/{rpc}" for service, rpcs in RPCS.items() for rpc in rpcs]


@dataclass
class Successor:
    """A teacher that is all but sure that each token is followed by the next number.

    It waits at ``gate`` before each pass, and counts the passes that it has begun.
    """

    profile: EngineProfile = field(
        default_factory=lambda: EngineProfile(
            name="successor",
            vocabulary_size=VOCABULARY,
            head_rows=128,
            max_row_tokens=4096,
            arithmetic_type="float32",
        )
    )
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    looks_ahead: bool = False
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def forget(self) -> None:
        """Count passes anew."""
        while self.begun.acquire(blocking=False):
            pass

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        self.begun.release()
        self.gate.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        for row in rows:
            here = torch.arange(row.first, row.first + row.count)
            if self.looks_ahead:
                here = (here + 1).clamp(max=len(row.token_ids) - 1)
            scores = torch.zeros(row.count, 128)
            history = row.token_ids.cumsum(0)[here].float()
            scores[:, 0] = history / 1e3  # everything up to here has its say
            scores[torch.arange(row.count), (row.token_ids[here] + 1) % VOCABULARY] += 20
            yield scores


class Caller:
    """A student with plain stubs over a channel without options."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.students = stubs.TeacherLogitsServiceStub(self.channel)
        self.scoring = scoring_service_pb2_grpc.ScoringServiceStub(self.channel)
        self.bulk = bulk_service_pb2_grpc.BulkServiceStub(self.channel)
        self.operator = operator_service_pb2_grpc.OperatorServiceStub(self.channel)

    def open(self, **profile: object) -> messages.OpenSessionResponse:
        return self.students.OpenSession(
            messages.OpenSessionRequest(
                request_id=keys.new_id("r", "test"),
                protocol_version=PROTOCOL_VERSION,
                profile=student_to_wire(a_student(**profile)),
            ),
            timeout=PATIENCE,
        )

    def settle(
        self, opened: messages.OpenSessionResponse, proofs: Sequence[messages.LocalityProof] = ()
    ) -> list[int]:
        """Prove what can be; return the transport of each writer."""
        session = self.students.ProveLocality(
            messages.ProveLocalityRequest(session_id=opened.session.session_id, proofs=proofs),
            timeout=PATIENCE,
        ).session
        return [settled.transport for settled in session.transports]

    def session(self, **profile: object) -> str:
        """Open and settle a session that streams; return its id."""
        opened = self.open(**{"transports": (Transport.STREAM,), **profile})
        self.settle(opened)
        return opened.session.session_id

    def request(
        self, session_id: str, *rows: Sequence[int], request_id: str = ""
    ) -> scoring_service_pb2.ScoreRequest:
        ids = array.array("i", [token for row in rows for token in row])
        return scoring_service_pb2.ScoreRequest(
            session_id=session_id,
            request_id=request_id or keys.new_id("r", "test"),
            input_ids=ids.tobytes(),
            row_lengths=[len(row) for row in rows],
            bad_rows=scoring_service_pb2.BAD_ROW_POLICY_REJECT,
        )

    def score(self, session_id: str, *rows: Sequence[int], request_id: str = "") -> LeaseTerms:
        request = self.request(session_id, *rows, request_id=request_id)
        return lease_from_wire(self.scoring.Score(request, timeout=PATIENCE).lease)

    def read(self, session_id: str, lease_id: str, offset: int = 0) -> bytes:
        request = bulk_service_pb2.ReadPayloadRequest(
            session_id=session_id, lease_id=lease_id, offset_bytes=offset
        )
        return b"".join(chunk.data for chunk in self.bulk.ReadPayload(request, timeout=PATIENCE))

    def release(self, session_id: str, lease_id: str) -> None:
        request = messages.ReleasePayloadRequest(session_id=session_id, lease_id=lease_id)
        self.students.ReleasePayload(request, timeout=PATIENCE)

    def inspect(self) -> operator_service_pb2.InspectResponse:
        return self.operator.Inspect(operator_service_pb2.InspectRequest(), timeout=PATIENCE)

    def await_that(self, holds: Callable[[operator_service_pb2.InspectResponse], bool]) -> None:
        """Ask until something is so."""
        limit = MonotonicClock().now() + PATIENCE
        while not holds(self.inspect()):
            assert MonotonicClock().now() < limit


def a_student(**given: object) -> StudentProfile:
    grid = BatchGrid(global_batch_size=4, data_parallel_size=1, micro_batch_size=1)
    return StudentProfile(**{"batch_grid": grid, "top_k": 4, **given})  # type: ignore[arg-type]


def refusal(call: Callable[[], object]) -> TeacherLogitsError:
    """The error of the tree that a call ends with."""
    with pytest.raises(grpc.RpcError) as failure:
        call()
    details = dict(cast("Sequence[tuple[str, bytes]]", failure.value.trailing_metadata()))
    error = from_status(status_pb2.Status.FromString(details[DETAILS_KEY]))
    assert error is not None
    return error


@dataclass(frozen=True, kw_only=True)
class Service:
    """A server, its teacher, and a student of it."""

    server: EmbeddedServer
    teacher: Successor
    caller: Caller


@contextmanager
def serving(
    folder: Path, teacher: Successor | None = None, **settings: object
) -> Iterator[Service]:
    teacher = teacher or Successor()
    values: dict[str, object] = {
        "listen": (f"unix:{folder}/s",),
        "pool_size_bytes": 2**22,
        "slab_size_bytes": 2**20,
    }
    with serve_in_thread(ServerConfig(**{**values, **settings}), teacher) as server:  # type: ignore[arg-type]
        teacher.forget()  # the probe's passes
        caller = Caller(server.address)
        try:
            yield Service(server=server, teacher=teacher, caller=caller)
        finally:
            teacher.gate.set()
            caller.channel.close()


@pytest.fixture(scope="module")
def lasting_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("server")) as service:
        yield service


@pytest.fixture
def service(lasting_service: Service) -> Iterator[Service]:
    """The module's server, with its gate open."""
    lasting_service.teacher.forget()
    yield lasting_service
    lasting_service.teacher.gate.set()


@pytest.fixture
def caller(service: Service) -> Caller:
    return service.caller


class TestHandshake:
    def test_tells_a_student_of_the_teacher_the_broker_and_the_checks(
        self, caller: Caller, service: Service
    ) -> None:
        opened = caller.open()

        assert opened.broker_path == service.server.readiness.broker
        assert len(opened.nonce) == 32
        assert opened.session.teacher.vocabulary_size == VOCABULARY
        assert opened.session.teacher.engine == "successor"
        assert opened.session.default_wait.ToTimedelta() == timedelta(seconds=30)
        assert "causality" in [check.name for check in opened.session.checks]

    def test_settles_on_streaming_what_was_not_proven_and_says_why(self, caller: Caller) -> None:
        opened = caller.open()
        session = caller.students.ProveLocality(
            messages.ProveLocalityRequest(session_id=opened.session.session_id), timeout=PATIENCE
        ).session
        [settled] = session.transports

        assert settled.transport == transport_to_wire(Transport.STREAM)
        assert {refusal.reason for refusal in settled.refusals} == {
            "OTHER_PROCESS",
            "NOT_OFFERED",
            "PROOF_MISSING",
        }

    def test_lets_a_client_of_this_process_read_the_writer_s_own_memory(
        self, caller: Caller
    ) -> None:
        opened = caller.open(transports=(Transport.LOCAL,))
        resident = inprocess.find(opened.session.epoch)
        assert resident is not None
        mac = proof_of(resident.secret, nonce=opened.nonce, transport=Transport.LOCAL)
        proof = messages.LocalityProof(
            transport=transport_to_wire(Transport.LOCAL), writer_id="server", mac=mac
        )

        assert caller.settle(opened, [proof]) == [transport_to_wire(Transport.LOCAL)]
        lease = caller.score(opened.session.session_id, [5, 6, 7])
        assert lease.extent is not None
        room = resident.find_slab(lease.extent.slab_id).room(lease.extent)
        ids = column_tensor(room, lease.payload.column(ColumnKind.TOPK_IDS))
        assert ids[:, 0].tolist() == [6, 7, 8]

    def test_refuses_with_every_broken_rule(self, caller: Caller) -> None:
        grid = BatchGrid(global_batch_size=10, data_parallel_size=4, micro_batch_size=3)
        error = refusal(lambda: caller.open(batch_grid=grid, top_k=999, vocabulary_size=7))

        assert isinstance(error, SessionRefusedError)
        rules = [violation.rule for violation in error.violations]
        assert rules == ["student_dp_indivisible", "vocab_mismatch", "top_k_too_large"]

    def test_refuses_a_proof_of_another_writer(self, caller: Caller) -> None:
        opened = caller.open()
        proof = messages.LocalityProof(
            transport=transport_to_wire(Transport.LOCAL), writer_id="someone"
        )

        error = refusal(lambda: caller.settle(opened, [proof]))
        assert isinstance(error, RequestInvalidError)
        assert "'someone'" in error.message

    def test_does_no_work_before_it_is_over(self, caller: Caller) -> None:
        opened = caller.open()

        error = refusal(lambda: caller.score(opened.session.session_id, [1, 2]))
        assert isinstance(error, NotAllowedError)
        assert "ProveLocality" in error.message

    def test_of_a_session_that_is_closed_is_over(self, caller: Caller) -> None:
        session_id = caller.session()
        request = messages.CloseSessionRequest(session_id=session_id)
        for _ in range(2):
            caller.students.CloseSession(request, timeout=PATIENCE)

        assert isinstance(refusal(lambda: caller.score(session_id, [1])), SessionExpiredError)

    def test_ends_when_no_renewal_comes(self, tmp_path: Path) -> None:
        times: dict[str, object] = {
            "session_ttl": timedelta(milliseconds=100),
            "renew_interval": timedelta(milliseconds=50),
        }
        with serving(tmp_path, None, **times) as service:
            session_id = service.caller.session()
            service.caller.await_that(lambda view: not view.sessions)

            renew = messages.RenewSessionRequest(session_id=session_id)
            error = refusal(lambda: service.caller.students.RenewSession(renew, timeout=PATIENCE))
            assert isinstance(error, SessionExpiredError)

    def test_an_id_of_an_older_server_says_so(self, caller: Caller) -> None:
        old = keys.new_id("s", "0123456789ab")

        assert isinstance(refusal(lambda: caller.score(old, [1])), EpochChangedError)


class TestEveryRpc:
    @pytest.mark.parametrize("method", METHODS)
    def test_without_a_deadline_is_refused(self, caller: Caller, method: str) -> None:
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = caller.channel.unary_stream(method)

        error = refusal(lambda: list(call(b"")))
        assert isinstance(error, RequestInvalidError)
        assert method in error.message

    @pytest.mark.parametrize("garbage", [b"\xff" * 40, pickle.dumps(["pickle"]), b"\n\xffabc"])
    @pytest.mark.parametrize("method", METHODS)
    def test_with_garbage_ends_with_an_error_of_the_tree(
        self, caller: Caller, method: str, garbage: bytes
    ) -> None:
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = caller.channel.unary_stream(method)
        try:
            answer = list(call(garbage, timeout=PATIENCE))
        except grpc.RpcError:
            error = refusal(lambda: list(call(garbage, timeout=PATIENCE)))
            assert not error.reason.startswith("INTERNAL")
        else:  # fields that nobody knows, in a call that takes none
            assert method.endswith("Inspect")
            assert len(answer) == 1


class TestScoring:
    def test_answers_with_a_lease_whose_bytes_stream(self, caller: Caller) -> None:
        session_id = caller.session()
        lease = caller.score(session_id, [5, 6, 7], [VOCABULARY - 1])
        content = bytearray(caller.read(session_id, lease.lease_id))

        assert lease.extent is None
        assert len(content) == lease.payload.size_bytes
        ids = column_tensor(content, lease.payload.column(ColumnKind.TOPK_IDS))
        assert ids[:, 0].tolist() == [6, 7, 8, 0]

    def test_gives_a_retry_the_same_lease(self, caller: Caller) -> None:
        session_id = caller.session()
        first = caller.score(session_id, [1, 2], request_id="again")

        assert caller.score(session_id, [1, 2], request_id="again") == first

    def test_computes_once_for_a_retry_that_comes_while_it_runs(self, service: Service) -> None:
        caller, teacher = service.caller, service.teacher
        session_id = caller.session()
        request = caller.request(session_id, [1, 2], request_id="impatient")
        teacher.gate.clear()
        first = caller.scoring.Score.future(request, timeout=PATIENCE)
        assert teacher.begun.acquire(timeout=PATIENCE)
        second = caller.scoring.Score.future(request, timeout=PATIENCE)
        caller.await_that(lambda view: view.queue.running_requests == 1)
        teacher.gate.set()

        assert first.result().lease == second.result().lease
        assert not teacher.begun.acquire(blocking=False)

    def test_waits_no_longer_than_the_server_s_default(self, tmp_path: Path) -> None:
        with serving(tmp_path, default_wait=timedelta(milliseconds=50)) as service:
            session_id = service.caller.session()
            service.teacher.gate.clear()

            error = refusal(lambda: service.caller.score(session_id, [1]))
            service.teacher.gate.set()

            assert isinstance(error, DeadlinePassedError)
            assert "--default-wait, 0.05 s" in error.message
            service.caller.await_that(lambda view: view.pool.used_bytes == 0)

    def test_forgets_a_call_that_was_cancelled(self, tmp_path: Path) -> None:
        with serving(tmp_path) as service:  # in which no other session ends meanwhile
            self._cancel_two(service)

    def _cancel_two(self, service: Service) -> None:
        caller, teacher = service.caller, service.teacher
        session_id = caller.session()
        teacher.gate.clear()
        running = caller.scoring.Score.future(caller.request(session_id, [1]), timeout=PATIENCE)
        assert teacher.begun.acquire(timeout=PATIENCE)
        waiting = caller.scoring.Score.future(caller.request(session_id, [2]), timeout=PATIENCE)
        caller.await_that(lambda view: view.queue.waiting_requests == 1)
        waiting.cancel()
        caller.await_that(lambda view: view.queue.waiting_requests == 0)
        running.cancel()
        caller.inspect()  # behind it on the connection: what is answered now finds nobody
        teacher.gate.set()
        caller.await_that(lambda view: view.queue.running_requests == 0)

        caller.await_that(lambda view: view.pool.used_bytes == 0)
        assert not teacher.begun.acquire(blocking=False)  # the second never began

    def test_refuses_what_is_too_long_with_the_limit(self, tmp_path: Path) -> None:
        with serving(tmp_path, max_request_tokens=10) as service:
            session_id = service.caller.session()

            error = refusal(lambda: service.caller.score(session_id, [1] * 11))
            assert isinstance(error, PayloadInvalidError)
            assert error.facts == {"tokens": 11, "limit": 10}

    def test_refuses_a_message_that_is_larger_than_any_request_before_reading_it(
        self, caller: Caller
    ) -> None:
        session_id = caller.session()
        request = caller.request(session_id, [1] * (2**20 + 2**15))

        with pytest.raises(grpc.RpcError) as failure:
            caller.scoring.Score(request, timeout=PATIENCE)
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    def test_reads_any_request_that_may_be_asked(self, tmp_path: Path) -> None:
        with serving(tmp_path, max_request_tokens=2**21) as service:
            rows = [[VOCABULARY] * 4000] * 300  # more than gRPC's own limit of 4 MiB
            error = refusal(lambda: service.caller.score(service.caller.session(), *rows))

            assert isinstance(error, PayloadInvalidError)
            assert error.facts["token_id"] == VOCABULARY

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"bad_rows": 0}, "bad_rows"),
            ({"bad_rows": 77}, "bad_rows"),
            ({"row_windows": [0, 1, 2]}, "row_windows"),
            ({"row_windows": [-1, 1]}, "window"),
            ({"row_lengths": [2**31 - 1]}, "add up"),
            ({"row_lengths": [-1]}, "length -1"),
            ({"row_lengths": []}, "empty"),
            ({"input_ids": b"abc"}, "bytes"),
            ({"request_id": ""}, "request id"),
            ({"input_ids": array.array("i", [VOCABULARY]).tobytes()}, "vocabulary"),
        ],
    )
    def test_refuses_a_request_that_makes_no_sense_before_it_computes(
        self, service: Service, change: dict[str, object], named: str
    ) -> None:
        caller = service.caller
        request = caller.request(caller.session(), [1])
        for name, value in change.items():
            request.ClearField(name)
            if isinstance(value, list):
                getattr(request, name).extend(value)
            else:
                setattr(request, name, value)

        error = refusal(lambda: caller.scoring.Score(request, timeout=PATIENCE))
        assert isinstance(error, RequestInvalidError | PayloadInvalidError)
        assert named in error.message
        assert not service.teacher.begun.acquire(blocking=False)


class TestStreaming:
    def test_goes_on_at_an_offset(self, caller: Caller) -> None:
        session_id = caller.session()
        lease = caller.score(session_id, list(range(50)))
        whole = caller.read(session_id, lease.lease_id)

        assert caller.read(session_id, lease.lease_id, 777) == whole[777:]
        assert caller.read(session_id, lease.lease_id, len(whole)) == b""

    def test_needs_no_options_of_the_channel_for_more_than_its_limit(self, tmp_path: Path) -> None:
        sizes = {"pool_size_bytes": 2**26, "chunk_bytes": 4 * 2**20 - 1024}
        with serving(tmp_path, None, **sizes) as service:
            caller = service.caller
            session_id = caller.session(top_k=VOCABULARY)
            lease = caller.score(session_id, *[[1] * 4000] * 4)

            assert lease.payload.size_bytes > 2 * 4 * 2**20
            assert len(caller.read(session_id, lease.lease_id)) == lease.payload.size_bytes

    def test_is_for_the_lease_s_own_session(self, caller: Caller) -> None:
        owner, other = caller.session(), caller.session()
        lease = caller.score(owner, [1])

        assert isinstance(refusal(lambda: caller.read(other, lease.lease_id)), NotAllowedError)
        caller.release(owner, lease.lease_id)
        assert isinstance(refusal(lambda: caller.read(owner, lease.lease_id)), LeaseLostError)

    def test_is_not_there_where_it_is_not_offered(self, tmp_path: Path) -> None:
        with serving(tmp_path, transports=(Transport.LOCAL,)) as service:
            opened = service.caller.open()

            assert opened.broker_path == ""
            with pytest.raises(grpc.RpcError) as failure:
                service.caller.read(opened.session.session_id, "l-none")
            assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert {path.name for path in tmp_path.iterdir()} == {"s", "s.lock"}


class TestInspection:
    def test_shows_sessions_leases_pool_and_queue(self, tmp_path: Path) -> None:
        with serving(tmp_path) as service:
            caller = service.caller
            session_id = caller.session(student_id="trainer")
            lease = caller.score(session_id, [1, 2, 3])
            view = caller.inspect()

        assert view.epoch == service.server.readiness.epoch
        assert not view.draining
        assert [teacher.teacher_id for teacher in view.teachers] == ["teacher"]
        [session] = view.sessions
        assert (session.session_id, session.student_id) == (session_id, "trainer")
        assert (session.liveness, session.lease_count) == ("ttl", 1)
        assert [each.lease_id for each in view.leases] == [lease.lease_id]
        assert view.pool.budget_bytes == 2**22
        assert view.pool.used_bytes == session.leased_bytes > 0
        assert (view.queue.scored_requests, view.queue.scored_tokens) == (1, 3)


class TestHealth:
    def _status(self, caller: Caller, service: str = "") -> int:
        request = HealthCheckRequest(service=service)
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = caller.channel.unary_unary(
            "/grpc.health.v1.Health/Check"
        )
        answer = check(request.SerializeToString(), timeout=PATIENCE)
        return HealthCheckResponse.FromString(answer).status

    @pytest.mark.parametrize("name", ["", *(f"teacher_logits.v1.{service}" for service in RPCS)])
    def test_is_serving_for_every_service(self, caller: Caller, name: str) -> None:
        assert self._status(caller, name) == HealthCheckResponse.SERVING

    def test_turns_when_the_teacher_s_thread_dies(self, tmp_path: Path) -> None:
        with serving(tmp_path) as service:
            session_id = service.caller.session()
            method: grpc.UnaryStreamMultiCallable[bytes, bytes]
            method = service.caller.channel.unary_stream("/grpc.health.v1.Health/Watch")
            watch = method(b"", timeout=PATIENCE)
            before = HealthCheckResponse.FromString(next(watch)).status
            service.teacher.failure = SystemExit("out of memory, say")
            with pytest.raises(grpc.RpcError):
                service.caller.score(session_id, [1])

            after = HealthCheckResponse.FromString(next(watch)).status
            assert (before, after) == (
                HealthCheckResponse.SERVING,
                HealthCheckResponse.NOT_SERVING,
            )
            watch.cancel()


class TestStarting:
    def test_says_where_it_listens_and_what_it_serves(self, tmp_path: Path) -> None:
        listen = (f"unix:{tmp_path}/s", "127.0.0.1:0")
        with serving(tmp_path, listen=listen, insecure=True, teacher_id="mine") as service:
            ready = service.server.readiness
            Caller(ready.addresses[1]).inspect()

        assert ready.address == f"unix:{tmp_path}/s"
        assert ready.broker == f"{tmp_path}/s.broker"
        assert not ready.addresses[1].endswith(":0")
        assert (ready.teacher_id, ready.vocabulary_size) == ("mine", VOCABULARY)
        assert ready.transports == ("cuda_ipc", "local", "shared_memory", "stream")
        assert ready.pid == os.getpid()

    @pytest.mark.parametrize(
        ("settings", "warned"),
        [
            ({"insecure": True}, "nothing is encrypted"),
            ({"tls_cert": "c", "tls_key": "k"}, "whoever reaches this may use the teacher"),
            ({"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}, None),
            ({"tls_cert": "c", "tls_key": "k", "token_file": "t"}, None),
        ],
    )
    def test_warns_of_a_port_that_lets_in_whoever_reaches_it(
        self, settings: dict[str, str], warned: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = ServerConfig(listen=("unix:/s", "node7:2"), **settings)  # type: ignore[arg-type]

        log_addresses(config.addresses, config)

        records = [record for record in caplog.records if record.levelno == logging.WARNING]
        ours = [record for record in records if record.name.startswith("teacher_logits")]
        assert [record.getMessage() for record in ours] == ([warned] if warned else [])
        assert all(record.__dict__["facts"]["address"] == "node7:2" for record in ours)

    @pytest.mark.parametrize(("uids", "mode"), [((), 0o600), ((4711,), 0o666)])
    def test_opens_its_sockets_to_its_own_user_unless_others_are_allowed(
        self, tmp_path: Path, uids: tuple[int, ...], mode: int
    ) -> None:
        with serving(tmp_path, allow_uids=uids):
            modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("s", "s.broker")}

        assert modes == {mode}

    def test_puts_the_broker_of_a_tcp_server_into_the_runtime_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        with serving(tmp_path, listen=("127.0.0.1:0",), insecure=True) as service:
            ready = service.server.readiness

        port = ready.address.rpartition(":")[2]
        assert ready.broker == f"{tmp_path}/teacher-logits/port-{port}.broker"

    def test_listens_in_the_runtime_folder_when_told_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:  # a socket's path has 107 bytes at most
            monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
            with serving(tmp_path, listen=()) as service:
                assert service.server.address == f"unix:{folder}/teacher-logits/teacher.sock"

    def test_a_broker_path_over_107_bytes_is_refused_with_the_flag_that_mends_it(
        self, tmp_path: Path
    ) -> None:
        folder = f"{tmp_path}/{'x' * (100 - len(str(tmp_path)))}"  # and then /s and .broker
        with (
            pytest.raises(ConfigError, match=r"--broker: .* 110 bytes"),
            serving(tmp_path, listen=(f"unix:{folder}/s",)),
        ):
            pass

        broker = str(tmp_path / "b")
        with serving(tmp_path, listen=(f"unix:{folder}/s",), broker=broker) as service:
            assert service.server.readiness.broker == broker

    def test_a_second_server_on_the_socket_is_refused_and_the_first_goes_on(
        self, tmp_path: Path
    ) -> None:
        with serving(tmp_path) as service:
            with pytest.raises(ConfigError, match=f"pid {os.getpid()} "), serving(tmp_path):
                pass

            assert service.caller.inspect().epoch == service.server.readiness.epoch

    def test_a_second_server_on_the_port_is_refused_by_its_address(self, tmp_path: Path) -> None:
        with serving(
            tmp_path, listen=("127.0.0.1:0",), insecure=True, transports=(Transport.STREAM,)
        ) as service:
            address = service.server.address
            with (
                pytest.raises(ConfigError, match=f"--listen {address}: Address already in use"),
                serving(tmp_path, listen=(f"unix:{tmp_path}/s", address), insecure=True),
            ):
                pass

            assert service.caller.inspect().epoch == service.server.readiness.epoch
            assert not (tmp_path / "s").exists()

    def test_a_teacher_that_looks_ahead_is_refused_and_leaves_nothing(self, tmp_path: Path) -> None:
        with (
            pytest.raises(AlignmentError),
            serving(tmp_path, teacher=Successor(looks_ahead=True)),
        ):
            pass

        assert list(tmp_path.iterdir()) == []


class TestStopping:
    def test_leaves_no_thread_no_descriptor_and_no_file(self, tmp_path: Path) -> None:
        def serve_once() -> None:
            with serving(tmp_path) as service:
                session_id = service.caller.session()
                lease = service.caller.score(session_id, [1, 2])
                service.caller.read(session_id, lease.lease_id)

        serve_once()  # gRPC keeps what it makes on its first use
        threads, descriptors = running_threads(), open_descriptors()
        serve_once()

        assert not left_behind(threads, running_threads)
        assert not left_behind(descriptors, open_descriptors)
        assert list(tmp_path.iterdir()) == []

    def test_tells_a_call_that_waits_for_the_teacher(self, tmp_path: Path) -> None:
        teacher = Successor()
        with serve_in_thread(ServerConfig(listen=(f"unix:{tmp_path}/s",)), teacher) as server:
            caller = Caller(server.address)
            session_id = caller.session()
            teacher.gate.clear()
            teacher.forget()
            running = caller.scoring.Score.future(caller.request(session_id, [1]), timeout=PATIENCE)
            assert teacher.begun.acquire(timeout=PATIENCE)
            waiting = caller.scoring.Score.future(caller.request(session_id, [2]), timeout=PATIENCE)
            caller.await_that(lambda view: view.queue.waiting_requests == 1)
            # From here on the server stops, while its teacher is still at work.
            waiting.add_done_callback(lambda call: teacher.gate.set())

        errors = [refusal(call.result) for call in (running, waiting)]
        caller.channel.close()
        assert [type(error) for error in errors] == [DrainingError, DrainingError]

    def test_forgets_the_server_in_the_table_of_this_process(self, tmp_path: Path) -> None:
        with serving(tmp_path) as service:
            epoch = service.server.readiness.epoch
            assert inprocess.find(epoch) is not None

        assert inprocess.find(epoch) is None
