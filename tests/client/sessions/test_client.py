"""The client against a real server in this process, over each transport."""

import logging
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tests.client.conftest import LOCAL, SHARED_MEMORY, STREAM, Service, a_profile, serve
from tests.clocks import AheadClock

import teacher_logits_client as tl
from teacher_logits.errors import (
    AlignmentError,
    ConfigError,
    DeadlinePassedError,
    LeaseLostError,
    NoCommonTransportError,
    NotAvailable,
    PayloadInvalidError,
    PayloadRetiredError,
    RequestInvalidError,
    ServerUnreachableError,
    SessionExpiredError,
    SessionRefusedError,
    SlabOpenError,
)
from teacher_logits.terms import LeaseTerms
from teacher_logits_client.calls import Calls
from teacher_logits_client.calls.opened import OpenedSession
from teacher_logits_client.config import parse_address
from teacher_logits_client.line import PassedSlab
from teacher_logits_client.rows.flat_rows import FlatRows
from teacher_logits_server import server

EACH = pytest.mark.parametrize(
    "transports", [LOCAL, SHARED_MEMORY, STREAM], ids=lambda t: t[0].value
)
IDS = torch.arange(40).view(4, 10) * 5 % 256


@contextmanager
def a_stranger(folder: Path, *, serving: bool | None) -> Iterator[str]:
    """A gRPC server that is none of ours: with health (and that service known), or without."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    if serving is not None:
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        if serving is False:
            name = "teacher_logits.v1.TeacherLogitsService"
            servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    address = f"unix:{folder / 'stranger'}"
    server.add_insecure_port(address)
    server.start()
    try:
        yield address
    finally:
        server.stop(0).wait()


@contextmanager
def a_port_of_nobody() -> Iterator[int]:
    """A port at which nobody listens, and which nobody else is given meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


class TestConnect:
    def test_nobody_at_the_port_is_said_within_the_deadline(self) -> None:
        with a_port_of_nobody() as port:
            where = rf"127\.0\.0\.1:{port} within 0\.3 s"
            with pytest.raises(ServerUnreachableError, match=where):
                tl.connect(f"127.0.0.1:{port}", timeout=0.3)

    def test_nobody_at_the_socket_is_said_within_the_deadline(self, tmp_path: Path) -> None:
        with pytest.raises(ServerUnreachableError, match="nobody") as caught:
            tl.connect(f"unix:{tmp_path}/nobody", timeout=0.3)
        assert caught.value.facts["deadline_seconds"] == 0.3

    def test_a_server_that_comes_within_the_deadline_is_waited_for(self, tmp_path: Path) -> None:
        with futures.ThreadPoolExecutor() as threads:
            call = threads.submit(tl.connect, f"unix:{tmp_path}/s", timeout=30)
            with serve(tmp_path):
                call.result(30).close()

    def test_a_server_that_does_not_serve_yet_is_not_called_absent(self, tmp_path: Path) -> None:
        with (
            a_stranger(tmp_path, serving=False) as address,
            pytest.raises(NotAvailable, match=r"did not serve within 2 s") as caught,
        ):
            tl.connect(address, timeout=2)  # it must be heard of in that time
        assert not isinstance(caught.value, ServerUnreachableError)

    @pytest.mark.parametrize("serving", [None, True], ids=["without health", "another service"])
    def test_a_server_of_another_kind_is_recognised(
        self, tmp_path: Path, serving: bool | None
    ) -> None:
        with (
            a_stranger(tmp_path, serving=serving) as address,
            pytest.raises(RequestInvalidError, match="no teacher-logits server"),
        ):
            tl.connect(address, timeout=30)

    def test_proxies_of_the_environment_are_ignored(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)

        with tl.connect(service.addresses[1]) as client, client.open_session(a_profile()):
            pass

    @pytest.mark.parametrize(
        ("address", "says"),
        [
            ("", "no address"),
            ("localhost", "no address"),
            ("unix:relative", "absolute path"),
            ("unix:/" + "x" * 107, "108 bytes"),
            ("host:70000", "ports go to 65535"),
            ("host:0", "goes from 1 to 65535"),
            ("::1:5555", "no address"),
            ("http://host:5", "no address"),
            ("teacher.example:5555", "insecure=True"),
            ("10.0.0.1:5555", "insecure=True"),
            ("/", "not the absolute path"),
            (Path("relative"), "absolute path"),
            (None, "NoneType"),
            (5555, "int"),
        ],
    )
    def test_an_address_of_no_use_is_refused_before_anything_is_tried(
        self, address: str, says: str
    ) -> None:
        with pytest.raises(ConfigError, match=says):
            tl.connect(address)

    def test_a_socket_may_be_named_by_its_path_alone(self, service: Service) -> None:
        path = service.address.removeprefix("unix:")

        for address in (path, Path(path)):
            with tl.connect(address) as client:
                assert str(client.address) == service.address

    def test_a_folder_or_a_file_at_the_path_is_said_without_waiting(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()

        with pytest.raises(ConfigError, match="is a folder"):
            tl.connect(tmp_path, timeout=3600)
        with pytest.raises(ConfigError, match="is no socket"):
            tl.connect(tmp_path / "file", timeout=3600)

    def test_a_brokers_socket_is_recognised_without_waiting(self, service: Service) -> None:
        with pytest.raises(ConfigError, match="broker's socket"):
            tl.connect(f"{service.address}.broker", timeout=3600)

    def test_what_failed_in_grpc_is_raised_without_its_traceback(self) -> None:
        with a_port_of_nobody() as port:
            nobody = Calls(parse_address(f"127.0.0.1:{port}"))
            with pytest.raises(ServerUnreachableError) as caught:
                nobody.renew("session", timeout=30)
            nobody.close()
        assert caught.value.facts["code"] == "UNAVAILABLE"
        assert "grpc" not in "".join(traceback.format_exception(caught.value, limit=0))

    @pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), None, "soon"])
    def test_a_call_without_a_deadline_is_refused(self, timeout: float) -> None:
        with pytest.raises(ConfigError, match="every call has a deadline"):
            tl.connect("unix:/nobody", timeout=timeout)

    def test_a_closed_client_says_so(self, service: Service) -> None:
        client = tl.connect(service.address)
        client.close()
        client.close()

        with pytest.raises(ServerUnreachableError, match="closed"):
            client.open_session(a_profile())


class TestHandshake:
    def test_words_stand_for_their_enums(self, service: Service) -> None:
        profile = a_profile(
            transports="stream",
            value_type="float32",
            vocabulary_policy="truncate",
            locality="rule",
            columns=["topk_ids"],
        )

        assert profile == a_profile(
            transports=STREAM,
            value_type=tl.ElementType.FLOAT32,
            vocabulary_policy=tl.VocabularyPolicy.TRUNCATE,
            locality=tl.Locality.RULE,
            columns=(tl.ColumnKind.TOPK_IDS,),
        )
        assert a_profile(transports=tl.Transport.STREAM).transports == STREAM
        with (
            tl.connect(service.address) as client,
            client.open_session(a_profile(transports="stream")) as session,
        ):
            assert session.transport is tl.Transport.STREAM

    @pytest.mark.parametrize(
        ("said", "says"),
        [
            ({"transports": ("steam",)}, "transports has 'steam'.*'stream'"),
            ({"transports": None}, "transports has None"),
            ({"value_type": torch.float16}, "value_type has torch.float16.*'float16'"),
            ({"locality": "always"}, "locality has 'always'.*'prefer', 'require', 'rule'"),
            ({"vocabulary_policy": "lax"}, "vocabulary_policy has 'lax'"),
            ({"columns": "topk"}, "columns has 'topk'"),
        ],
        ids=str,
    )
    def test_a_word_that_is_none_is_refused_with_the_choices(
        self, said: dict[str, object], says: str
    ) -> None:
        with pytest.raises(RequestInvalidError, match=says):
            a_profile(**said)

    def test_no_transport_at_all_no_profile_and_no_mode_are_refused(self, service: Service) -> None:
        with tl.connect(service.address) as client:
            with pytest.raises(RequestInvalidError, match="wants no transport"):
                client.open_session(a_profile(transports=()))
            with pytest.raises(RequestInvalidError, match="given a dict: give a StudentProfile"):
                client.open_session({"top_k": 8})  # type: ignore[arg-type]
            with pytest.raises(RequestInvalidError, match=r"mode has 'rw'.*'read_only'"):
                client.open_session(a_profile(), mode="rw")  # type: ignore[arg-type]

    @EACH
    def test_the_wanted_transport_is_settled(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with service.session(transports) as (_, session):
            assert session.transport is transports[0]
            assert session.transports == {"server": transports[0]}
            assert session.refusals == ()

    def test_the_best_of_all_is_settled_and_what_was_passed_over_is_named(
        self, service: Service
    ) -> None:
        wanted = (tl.Transport.CUDA_IPC, tl.Transport.RAY_OBJECT, *STREAM)
        with service.session(wanted) as (_, session):
            refused = {refusal.transport: refusal.reason.value for refusal in session.refusals}

        assert refused == {
            tl.Transport.CUDA_IPC: "NOT_OFFERED",
            tl.Transport.RAY_OBJECT: "NOT_OFFERED",
        }

    def test_a_transport_that_this_server_has_not_is_named_where_nothing_else_is_wanted(
        self, service: Service
    ) -> None:
        with (
            tl.connect(service.address) as client,
            pytest.raises(NoCommonTransportError, match=r"\(ray_object NOT_OFFERED: ") as caught,
        ):
            client.open_session(a_profile(transports=(tl.Transport.RAY_OBJECT,)))
        assert caught.value.facts == {"ray_object": "NOT_OFFERED"}

    def test_hints_are_filled_in(self, service: Service) -> None:
        with service.session() as (_, session):
            hints = session.profile.hints

        assert hints.pid > 0
        assert set(hints.versions) == {"python", "torch", "grpcio", "protobuf", "teacher-logits"}
        assert set(hints.namespaces) == {"pid", "ipc", "net", "mnt"}

    def test_hints_that_were_given_stay(self, service: Service) -> None:
        with service.session(hints=tl.NodeHints(host_name="mine")) as (_, session):
            assert session.profile.hints == tl.NodeHints(host_name="mine")

    def test_what_was_not_checked_is_called_unchecked(self, service: Service) -> None:
        with service.session() as (_, session):
            verdicts = {check.name: check.verdict for check in session.checks}

        assert verdicts["tokenizer"] is tl.Verdict.UNCHECKED
        assert verdicts["causality"] is tl.Verdict.PASSED

    def test_every_broken_rule_is_named(self, service: Service) -> None:
        grid = tl.BatchGrid(global_batch_size=10, data_parallel_size=3, micro_batch_size=0)
        with (
            tl.connect(service.address) as client,
            pytest.raises(SessionRefusedError) as caught,
        ):
            client.open_session(a_profile(batch_grid=grid, top_k=5000))

        rules = {violation.rule for violation in caught.value.violations}
        assert {"not_positive", "top_k_too_large"} <= rules

    def test_locality_that_is_required_and_not_proven_refuses_the_session(
        self, service: Service
    ) -> None:
        with (
            tl.connect(service.address) as client,
            pytest.raises(SessionRefusedError) as caught,
        ):
            client.open_session(a_profile(transports=STREAM, locality=tl.Locality.REQUIRE))
        assert [violation.rule for violation in caught.value.violations] == ["not_proven_local"]

    def test_nothing_in_common_is_refused_with_every_reason(self, service: Service) -> None:
        with (
            tl.connect(service.address) as client,
            pytest.raises(NoCommonTransportError, match="cuda_ipc NOT_OFFERED"),
        ):
            client.open_session(a_profile(transports=(tl.Transport.CUDA_IPC,)))

    def test_a_broker_that_cannot_be_reached_is_a_refusal_with_the_systems_words(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def nobody(path: str, timeout: float) -> socket.socket:
            raise ConnectionRefusedError(111, "Connection refused")

        monkeypatch.setattr("teacher_logits_client.line.packets.connect", nobody)
        with service.session((*SHARED_MEMORY, *STREAM)) as (_, session):
            [refusal] = session.refusals

        assert session.transport is tl.Transport.STREAM
        assert refusal.reason.value == "BROKER_UNREACHABLE"
        assert "Connection refused" in refusal.message

    def test_a_broker_whose_folder_has_another_name_here_is_found(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        honest = Calls.open_session

        def elsewhere(self: Calls, profile: tl.StudentProfile, **how: object) -> OpenedSession:
            opened = honest(self, profile, **how)  # type: ignore[arg-type]
            name = opened.broker_path.rpartition("/")[2]
            return OpenedSession(
                terms=opened.terms, broker_path=f"/elsewhere/{name}", nonce=opened.nonce
            )

        monkeypatch.setattr(Calls, "open_session", elsewhere)
        with service.session() as (_, session):
            assert session.transport is tl.Transport.SHARED_MEMORY


class TestScore:
    @EACH
    def test_brings_the_teachers_best_entries(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with (
            service.session(transports, value_type=tl.ElementType.FLOAT32) as (_, session),
            session.score(IDS).result() as payload,
        ):
            columns = {name: tensor.clone() for name, tensor in payload.columns.items()}
            assert payload.transport is transports[0]

        scores = torch.cat([logits.log_softmax(1) for logits in teacher_logits(service, IDS)])
        best = scores.topk(8)
        torch.testing.assert_close(columns["topk_logprobs"], best.values)
        assert torch.equal(columns["topk_ids"].long(), best.indices)
        assert columns["row_offsets"].tolist() == [0, 10, 20, 30, 40]

    def test_has_the_same_digest_over_every_transport(self, service: Service) -> None:
        digests = set()
        for transports in (LOCAL, SHARED_MEMORY, STREAM):
            with (
                service.session(transports) as (_, session),
                session.score(IDS).result() as payload,
            ):
                digests.add(payload.digest())

        assert len(digests) == 1

    def test_one_payload_read_over_two_transports_has_one_digest(self, service: Service) -> None:
        with (
            service.session(SHARED_MEMORY) as (_, writer),
            service.session(STREAM) as (_, reader),
            writer.score(IDS).result() as first,
            reader.acquire(payload_id=first.payload.payload_id, input_ids=IDS) as second,
        ):
            assert first.digest() == second.digest()
            assert [check.verdict for check in second.checks] == [tl.Verdict.PASSED] * 3

    def test_rows_may_be_a_rectangle_with_lengths_or_a_list(self, service: Service) -> None:
        lengths = [10, 3, 1, 7]
        rows = [row[:length] for row, length in zip(IDS, lengths, strict=True)]
        digests = set()
        with service.session() as (_, session):
            for future in (
                session.score(IDS, lengths=lengths),
                session.score(IDS.int(), lengths=torch.tensor(lengths)),
                session.score(rows),
                session.score([row.tolist() for row in rows]),
            ):
                with future.result() as payload:
                    digests.add(payload.digest())
                    assert payload.row_offsets.diff().tolist() == lengths

        assert len(digests) == 1

    def test_only_the_windows_asked_for_are_scored(self, service: Service) -> None:
        with service.session() as (_, session):
            with session.score(IDS).result() as payload:
                whole = payload.columns["topk_ids"].clone()
            with session.score(IDS, windows=[[2, 3], [0, 0], [9, 1], [0, 10]]).result() as payload:
                part = payload.columns["topk_ids"].clone()
                valid = payload.targets.valid.clone()

        assert torch.equal(part, torch.cat([whole[2:5], whole[29:30], whole[30:40]]))
        assert valid.tolist() == [True] * 3 + [False] + [True] * 9 + [False]

    def test_positions_count_from_the_students_own_first_token(self, service: Service) -> None:
        prefix = [[1, 2, 3], [], [9], [4, 4]]
        with service.session(value_type=tl.ElementType.FLOAT32) as (_, session):
            with session.score(IDS, prefix_ids=prefix).result() as payload:
                got = payload.columns["topk_ids"].clone()
                assert payload.row_offsets.tolist() == [0, 10, 20, 30, 40]

        rows = [torch.tensor([*p, *row.tolist()]) for p, row in zip(prefix, IDS, strict=True)]
        expected = [
            logits[len(p) :].topk(8).indices
            for p, logits in zip(prefix, teacher_logits(service, rows), strict=True)
        ]
        assert torch.equal(got.long(), torch.cat(expected))

    def test_a_temperature_that_fp32_cannot_hold_is_found_again(self, service: Service) -> None:
        with (
            service.session(temperatures=(0.7,)) as (_, session),
            session.score(IDS).result() as payload,
        ):
            # As it comes out of an fp32 field; some releases of protobuf round it on reading.
            payload.payload = replace(payload.payload, temperatures=(1.0, 0.699999988079071))
            assert payload.targets_at(0.7).temperature == pytest.approx(0.7)
            assert payload.targets_at(0.7) is payload.targets_at(0.7)
            with pytest.raises(PayloadInvalidError, match="has no temperature 3"):
                payload.targets_at(3.0)

    def test_several_requests_may_be_under_way(self, service: Service) -> None:
        with service.session() as (client, session):
            asked = [session.score(IDS[:, : n + 1]) for n in range(10)]
            for n, future in reversed(list(enumerate(asked))):
                with future.result() as payload:
                    assert payload.payload.position_count == 4 * (n + 1)
            assert service.lease_count(client) == 0

    def test_a_last_position_is_not_valid_since_nothing_comes_next(self, service: Service) -> None:
        with (
            service.session() as (_, session),
            session.score(IDS, lengths=[2, 1, 3, 1]).result() as payload,
        ):
            assert payload.targets.valid.tolist() == [True, False, False, True, True, False, False]

    def test_rows_that_the_teacher_cannot_score_are_refused_or_masked(
        self, service: Service
    ) -> None:
        service.teacher.spoil = spoil_the_third_row()
        with service.session() as (client, session):
            with pytest.raises(PayloadInvalidError, match="row 2"):
                session.score(IDS).result()
            service.teacher.spoil = spoil_the_third_row()
            with session.score(IDS, bad_rows="mask").result() as payload:
                assert payload.columns["row_status"].tolist() == [0, 0, 1, 0]
                assert payload.targets.valid.view(4, 10).any(1).tolist() == [
                    True,
                    True,
                    False,
                    True,
                ]
            assert service.lease_count(client) == 0

    def test_a_policy_that_is_none_is_refused(self, service: Service) -> None:
        with service.session() as (_, session), pytest.raises(PayloadInvalidError, match="'zero'"):
            session.score(IDS, bad_rows="zero")  # type: ignore[arg-type]

    def test_more_tokens_than_the_server_takes_are_refused_before_they_are_sent(
        self, service: Service
    ) -> None:
        with service.session() as (_, session):
            limit = session.terms.max_request_tokens
            with pytest.raises(PayloadInvalidError, match=f"{limit + 4} tokens.*{limit}"):
                session.score(torch.zeros(4, limit // 4 + 1, dtype=torch.int64))

    @pytest.mark.parametrize("rows", ["list", "tensor"])
    def test_far_too_many_rows_are_refused_before_anything_is_made_of_them(
        self, service: Service, monkeypatch: pytest.MonkeyPatch, rows: str
    ) -> None:
        monkeypatch.setattr("teacher_logits_client.student.make_row_batch", None)
        with service.session() as (_, session):
            limit = session.terms.max_request_tokens
            ids = torch.ones(limit + 1, 1, dtype=torch.int64)
            with pytest.raises(PayloadInvalidError, match=f"{limit + 1} tokens.*{limit}"):
                session.score([[1]] * (limit + 1) if rows == "list" else ids)

    def test_a_payload_about_other_tokens_is_refused_and_given_back(self, service: Service) -> None:
        with (
            service.session() as (client, session),
            session.score(IDS).result() as payload,
        ):
            other = IDS.clone()
            other[2, 4] += 1
            with pytest.raises(AlignmentError, match="row 2"):
                session.acquire(payload_id=payload.payload.payload_id, input_ids=other)
            assert service.lease_count(client) == 1

    def test_a_payload_without_its_rows_is_unchecked(self, service: Service) -> None:
        with (
            service.session() as (_, session),
            session.score(IDS).result() as payload,
            session.acquire(payload_id=payload.payload.payload_id) as again,
        ):
            verdicts = {check.name: check.verdict for check in again.checks}

        assert verdicts["row_digests"] is tl.Verdict.UNCHECKED
        assert verdicts["lookup_identity"] is tl.Verdict.UNCHECKED

    def test_lengths_of_no_rows_are_refused_and_not_passed_over(self, service: Service) -> None:
        with service.session() as (_, session):
            for given in ({"lengths": [10] * 4}, {"windows": [[0, 1]] * 4}):
                with pytest.raises(PayloadInvalidError, match="without input_ids"):
                    session.acquire(payload_id="p", **given)

    def test_a_payload_that_nobody_leases_any_more_is_retired(self, service: Service) -> None:
        with service.session() as (client, session):
            with session.score(IDS).result() as payload:
                payload_id = payload.payload.payload_id
            assert service.lease_count(client) == 0
            with pytest.raises(PayloadRetiredError):
                session.acquire(payload_id=payload_id)

    def test_columns_that_were_kept_past_the_close_say_so(self, service: Service) -> None:
        with service.session() as (_, session):
            with session.score(IDS).result() as payload:
                columns = payload.columns
                assert columns["topk_ids"].shape == (40, 8)
                assert "vocabulary" not in columns
                assert columns.get("scored_ids") is None
                for name in ("topk_id", "scored_ids"):
                    with pytest.raises(KeyError, match=f"no column '{name}' .* has topk_ids, "):
                        columns[name]
            for use in (lambda: columns["topk_ids"], lambda: list(columns), lambda: len(columns)):
                with pytest.raises(LeaseLostError, match="acquire the payload again"):
                    use()

    def test_nothing_that_belongs_to_a_process_is_pickled(self, service: Service) -> None:
        with service.session() as (client, session):
            future = session.score(IDS)
            with future.result() as payload:
                for each in (client, session, future, payload):
                    with pytest.raises(RequestInvalidError, match="cannot be pickled or copied"):
                        pickle.dumps(each)


class TestFutures:
    def test_a_result_is_the_same_each_time(self, service: Service) -> None:
        with service.session() as (_, session):
            future = session.score(IDS)
            with future.result() as payload:
                assert future.result() is payload
                assert future.done()

    def test_a_wait_behind_another_threads_wait_ends_by_its_own_deadline(
        self, service: Service
    ) -> None:
        with service.session() as (_, session), futures.ThreadPoolExecutor(1) as other:
            future = session.score(IDS)
            other.submit(future._lock.acquire).result()  # as a thread in `result` has it
            with pytest.raises(DeadlinePassedError, match=r"0\.05 s .* another thread"):
                future.result(timeout=0.05)
            other.submit(future._lock.release).result()

            future.result(timeout=30).close()

    def test_a_cancel_while_another_thread_opens_it_is_too_late(
        self, service: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opening, may_open = threading.Event(), threading.Event()
        with service.session() as (client, session), futures.ThreadPoolExecutor(1) as other:
            future = session.score(IDS)
            open_now = future._answers.open

            def open_later(*lease: Any, **more: Any) -> tl.LeasedPayload:
                opening.set()
                assert may_open.wait(30)
                return open_now(*lease, **more)

            monkeypatch.setattr(future._answers, "open", open_later)
            result = other.submit(future.result)
            assert opening.wait(30)
            future.cancel()
            may_open.set()
            with result.result(30):
                assert service.lease_count(client) == 1
            assert service.lease_count(client) == 0

    def test_a_wait_that_is_too_short_says_what_was_waited_for_and_may_be_repeated(
        self, service: Service
    ) -> None:
        service.teacher.gate.clear()
        with service.session() as (_, session):
            future = session.score(IDS)
            with pytest.raises(
                DeadlinePassedError, match=r"waited 0\.05 s for the scores of 4 rows with 40 tokens"
            ):
                future.result(timeout=0.05)
            assert not future.done()
            service.teacher.gate.set()

            future.result(timeout=30).close()

    def test_a_request_past_its_deadline_gives_its_room_back(self, service: Service) -> None:
        service.teacher.gate.clear()
        with service.session() as (client, session):
            with pytest.raises(DeadlinePassedError):
                session.score(IDS, timeout=0.1).result()
            service.teacher.gate.set()
            with session.score(IDS).result():
                assert eventually(lambda: service.lease_count(client) == 1)
            assert eventually(lambda: service.inspect().pool.used_bytes == 0)

    @pytest.mark.parametrize("how", ["cancelled", "dropped"])
    def test_a_future_that_is_given_up_gives_its_room_back(
        self, service: Service, how: str
    ) -> None:
        service.teacher.gate.clear()
        with service.session() as (client, session):
            future = session.score(IDS)
            if how == "cancelled":
                future.cancel()
                with pytest.raises(CancelledError):
                    future.result()
            del future
            assert client._returner.wait(30)
            service.teacher.gate.set()
            session.score(IDS).result().close()
            assert eventually(lambda: service.lease_count(client) == 0)
            assert eventually(lambda: service.inspect().pool.used_bytes == 0)

    @pytest.mark.parametrize("how", ["cancelled", "dropped"])
    def test_a_result_that_nobody_took_is_given_back(self, service: Service, how: str) -> None:
        with service.session() as (client, session):
            future = session.score(IDS)
            done = threading.Event()
            future._pending._call.add_done_callback(lambda call: done.set())
            assert done.wait(30)
            assert service.lease_count(client) == 1

            if how == "cancelled":
                future.cancel()
            del future

            assert service.lease_count(client) == 0

    def test_cancelling_what_was_handed_out_changes_nothing(self, service: Service) -> None:
        with service.session() as (client, session):
            future = session.score(IDS)
            with future.result() as payload:
                future.cancel()
                assert service.lease_count(client) == 1
                assert payload.columns

    def test_a_failure_is_the_same_each_time_and_holds_no_room(self, service: Service) -> None:
        with service.session() as (client, session):
            future = session.score(IDS)
            # As if the teacher had scored the right rows one token off.
            shifted = FlatRows(ids=IDS.int().flatten().roll(3), lengths=torch.tensor([10] * 4))
            future._batch = replace(future._batch, rows=shifted)
            for _ in range(2):
                with pytest.raises(AlignmentError, match="row 0"):
                    future.result()
            assert service.lease_count(client) == 0

    def test_more_payloads_than_the_pool_holds_all_come(self, service: Service) -> None:
        """64 payloads of 32 KiB and more through a pool of 1 MiB."""
        ids = torch.zeros(1, 1000, dtype=torch.int64)
        with service.session() as (client, session):
            asked = [session.score(ids) for _ in range(64)]
            sizes = []
            for future in asked:
                with future.result() as payload:
                    sizes.append(payload.payload.size_bytes)
            assert sum(sizes) > 2 << 20
            assert service.lease_count(client) == 0


class TestSession:
    def test_a_closed_session_says_so(self, service: Service) -> None:
        with service.session() as (_, session):
            session.close()
            session.close()

            with pytest.raises(SessionExpiredError, match="closed by this client"):
                session.score(IDS)
            with pytest.raises(SessionExpiredError), session:
                pass

    @EACH
    def test_the_server_forgets_a_session_with_its_close(
        self, service: Service, transports: tuple[tl.Transport]
    ) -> None:
        with service.session(transports) as (client, session):
            ours = [session.terms.session_id]
            service.await_that(lambda view: [s.session_id for s in view.sessions] == ours)
            assert client.statistics().open_sessions == 1
            session.close()

            assert eventually(lambda: not service.inspect().sessions)
            assert client.statistics().open_sessions == 0

    def test_a_session_that_is_dropped_is_named_and_ended(self, service: Service) -> None:
        with tl.connect(service.address) as client:
            session = client.open_session(a_profile(transports=SHARED_MEMORY))
            with pytest.warns(ResourceWarning, match=session.terms.session_id):
                del session

            assert client._returner.wait(30)
            assert eventually(lambda: not service.inspect().sessions)

    def test_a_result_that_is_asked_for_after_the_close_is_refused_and_given_back(
        self, service: Service
    ) -> None:
        with service.session() as (client, session):
            future = session.score(IDS)
            future._pending.result(30)
            session.close()
            with pytest.raises(SessionExpiredError, match="closed by this client"):
                future.result()
            assert service.lease_count(client) == 0

    def test_a_session_keeps_its_client(self, service: Service) -> None:
        with tl.connect(service.address).open_session(a_profile()) as session:
            session.score(IDS).result().close()

    def test_an_idle_session_is_renewed_and_lives(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock, renewals = AheadClock(), threading.Semaphore(0)
        monkeypatch.setattr(server, "MonotonicClock", lambda: clock)
        interval = timedelta(milliseconds=50)
        with (
            serve(tmp_path, session_ttl=timedelta(seconds=30), renew_interval=interval) as service,
            service.session(STREAM) as (client, session),
        ):
            honest = client._calls.renew

            def renew(session_id: str, *, timeout: float) -> bool:
                draining = honest(session_id, timeout=timeout)
                renewals.release()
                return draining

            client._calls.renew = renew  # type: ignore[method-assign]
            for _ in range(4):  # 80 s by the server's clock: the session has no line
                for _ in range(2):  # the second was sent after the clock was put ahead
                    assert renewals.acquire(timeout=30)
                clock.advance(20)

            session.score(IDS).result().close()


class TestFallback:
    def test_a_slab_that_cannot_be_opened_is_streamed_and_said_once(
        self, service: Service, caplog: pytest.LogCaptureFixture
    ) -> None:
        """R39: the metric is ``fallbacks``."""
        caplog.set_level(logging.WARNING, "teacher_logits_client")
        with service.session(SHARED_MEMORY) as (_, session):
            with session.score(IDS).result() as payload:
                expected = {name: each.clone() for name, each in payload.columns.items()}
        with service.session((*SHARED_MEMORY, *STREAM)) as (client, session):
            break_slabs(session)
            for _ in range(3):
                with session.score(IDS).result() as payload:
                    assert payload.transport is tl.Transport.STREAM
                    found = dict(payload.columns)
                    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
                    del found
            assert client.statistics().fallbacks == 3
            assert service.lease_count(client) == 0

        [record] = [r for r in caplog.records if "comes over stream" in r.message]
        assert "no map today" in record.message

    def test_where_locality_is_required_the_failure_is_raised_and_the_lease_given_back(
        self, service: Service
    ) -> None:
        with service.session((*SHARED_MEMORY, *STREAM), locality=tl.Locality.REQUIRE) as (
            client,
            session,
        ):
            break_slabs(session)
            with pytest.raises(SlabOpenError, match="no map today"):
                session.score(IDS).result()
            assert service.lease_count(client) == 0


def break_slabs(session: tl.Session) -> None:
    def refuse(slab_id: str, timeout: float) -> PassedSlab:
        raise SlabOpenError("no map today")

    opener = session._reader._openers.by_transport[tl.Transport.SHARED_MEMORY]
    opener._get_slab = refuse  # type: ignore[attr-defined]


def teacher_logits(service: Service, rows: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What the teacher itself says of each row."""
    given = [SimpleNamespace(token_ids=row, first=0, count=len(row)) for row in rows]
    return list(service.teacher.logits(given))


def spoil_the_third_row() -> Callable[[torch.Tensor], torch.Tensor]:
    seen: list[torch.Tensor] = []

    def spoil(chunk: torch.Tensor) -> torch.Tensor:
        seen.append(chunk)
        return chunk * torch.nan if len(seen) == 3 else chunk

    return spoil


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something comes true within half a minute."""
    until = time.monotonic() + 30
    while not holds():
        if time.monotonic() > until:
            return False
    return True


class Cut:
    """A call that was granted a lease and ends on this side without it."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def result(self, timeout: float | None) -> None:
        raise grpc.FutureCancelledError

    def done(self) -> bool:
        return True

    def code(self) -> grpc.StatusCode:
        return self._code

    def cancel(self) -> None: ...


@pytest.mark.parametrize("transport", [tl.Transport.SHARED_MEMORY, tl.Transport.STREAM])
@pytest.mark.parametrize("how", ["heard", "dropped"])
def test_a_lease_whose_answer_never_comes_goes_back_by_its_request(
    service: Service, transport: tl.Transport, how: str
) -> None:
    with service.session((transport,)) as (client, session):
        future = session.score([[1, 2]])
        future._pending._call.result(30)
        assert service.lease_count(client) == 1
        future._pending._call = Cut(grpc.StatusCode.CANCELLED)  # type: ignore[assignment]
        if how == "heard":
            with pytest.raises(CancelledError):
                future.result()
        else:
            del future

        assert service.lease_count(client) == 0


def test_closing_a_session_gives_up_the_answers_that_nobody_took(service: Service) -> None:
    with service.session() as (client, session):
        future = session.score([[1, 2]])
        future._pending._call.result(30)
        session.close()

        assert service.lease_count(client) == 0
        assert service.inspect().pool.quarantined_bytes == 0
        with pytest.raises(SessionExpiredError):
            future.result()


def test_a_payload_whose_acquisition_failed_is_given_up_by_its_request(service: Service) -> None:
    with service.session() as (client, session), session.score([[1, 2]]).result() as payload:
        line = session._reader.line
        assert line is not None
        acquire = line.acquire

        def late(
            session_id: str, *, request_id: str, payload_id: str, timeout: float
        ) -> LeaseTerms:
            acquire(session_id, request_id=request_id, payload_id=payload_id, timeout=timeout)
            raise DeadlinePassedError("too late")

        line.acquire = late  # type: ignore[method-assign]
        with pytest.raises(DeadlinePassedError):
            session.acquire(payload_id=payload.payload.payload_id)

        assert service.lease_count(client) == 1
