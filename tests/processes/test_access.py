"""Who may do what, end to end: each refusal has its code, changes nothing, and is counted.

One server with TLS, client certificates, tokens and a list of users (`guarded`). What no client of
ours would send is sent by plain stubs and plain sockets.
"""

import contextlib
import ctypes
import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from google.rpc import status_pb2
from tests import forked
from tests.client.publishing.a_publisher import a_student, a_teacher, expected, some_rows
from tests.client.publishing.test_publisher import same
from tests.processes.guarded import (
    SECONDS,
    TOKENS,
    Guarded,
    code_of,
    guarded_server,
    shown,
    write_tokens,
)
from tests.reports.raw import Method, a_request, methods_of
from tests.transport_suite.writing import a_profile

import teacher_logits_client as tl
from teacher_logits.errors import (
    ConfigError,
    NotAllowedError,
    ServerUnreachableError,
    TeacherLogitsError,
    UnknownCallerError,
)
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.transport import RefusalReason, proof_of
from teacher_logits.v1 import (
    bulk_service_pb2,
    line_pb2,
    operator_service_pb2,
    registry_service_pb2,
    scoring_service_pb2,
    teacher_logits_service_pb2,
)
from teacher_logits.wire import student_to_wire, transport_to_wire
from teacher_logits.wire.errors import from_status
from teacher_logits_client.cli import inspect, top
from teacher_logits_client.line import Line
from teacher_logits_client.sessions.agreement import node_hints

Code = grpc.StatusCode
ROWS = [[3, 1, 4, 1, 5], [9, 2, 6]]
STREAM = (tl.Transport.STREAM,)
NOBODY = 65534
NOTHING: Mapping[str, object] = {}
WRITE_PAYLOAD = "/teacher_logits.v1.RegistryService/WritePayload"
REGISTRY = methods_of(registry_service_pb2)
OPERATOR = methods_of(operator_service_pb2)
SCORING = methods_of(scoring_service_pb2)
HELLO_AS = Path(__file__).with_name("hello_as.py")


@pytest.fixture(scope="module")
def place() -> Iterator[Guarded]:
    with guarded_server(allow_uid=4711) as guarded:
        yield guarded


@pytest.fixture
def channel(place: Guarded) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(place.unix) as opened:
        yield opened


class Opened(NamedTuple):
    """A session that plain stubs opened, which has proven nothing yet."""

    session_id: str
    nonce: bytes
    broker: str


def call(
    channel: grpc.Channel,
    method: Method,
    who: str,
    given: Mapping[str, object] = NOTHING,
    *,
    secret: str = "",
) -> bytes:
    """Call a method as somebody, with a message of what is given."""
    request = method.request(**given).SerializeToString()
    plain = channel.unary_unary(method.path, bytes, bytes)
    return plain(request, timeout=SECONDS, metadata=shown(who, secret))


def student_method(name: str) -> Method:
    return next(m for m in methods_of(teacher_logits_service_pb2) if str(m) == name)


def opening(profile: tl.StudentProfile, request_id: str) -> Mapping[str, object]:
    return {
        "request_id": request_id,
        "protocol_version": PROTOCOL_VERSION,
        "profile": student_to_wire(profile),
    }


def open_raw(channel: grpc.Channel, profile: tl.StudentProfile, request_id: str) -> Opened:
    raw = call(channel, student_method("OpenSession"), "alice", opening(profile, request_id))
    answer = teacher_logits_service_pb2.OpenSessionResponse.FromString(raw)
    return Opened(answer.session.session_id, answer.nonce, answer.broker_path)


def close_raw(channel: grpc.Channel, opened: Opened, secret: str = "") -> None:
    close = student_method("CloseSession")
    call(channel, close, "alice", {"session_id": opened.session_id}, secret=secret)


def hello_of(opened: Opened, *, shows_secret: bool = True) -> bytes:
    request = line_pb2.LineRequest(call_id=1)
    request.hello.session_id, request.hello.nonce = opened.session_id, opened.nonce
    request.hello.shows_secret = shows_secret
    return request.SerializeToString()


def say(path: str, packet: bytes) -> tuple[socket.socket, line_pb2.LineReply]:
    """Say something on a line of one's own; whoever asked closes it."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(SECONDS)
    line.connect(path)
    line.send(packet)
    return line, line_pb2.LineReply.FromString(line.recv(65536))


def error_of(reply: line_pb2.LineReply) -> TeacherLogitsError:
    status = status_pb2.Status.FromString(reply.status)
    assert status.code == Code.PERMISSION_DENIED.value[0]
    error = from_status(status)
    assert error is not None
    return error


class TestTokens:
    @pytest.mark.parametrize("over_tcp", [False, True], ids=["unix", "tls"])
    def test_whoever_belongs_there_does_what_its_role_is_for(
        self, place: Guarded, over_tcp: bool
    ) -> None:
        profile = a_profile()
        with (
            place.connect("alice", over_tcp=over_tcp) as client,
            client.open_session(profile) as session,
            session.score(ROWS).result(timeout=SECONDS) as payload,
        ):
            assert len(payload.row_offsets) == len(ROWS) + 1
            assert session.transport is tl.Transport.SHARED_MEMORY

    def test_a_publisher_streams_over_tls_what_a_student_reads(self, place: Guarded) -> None:
        ids, lengths, logits = some_rows(0)
        with (
            place.connect("pool", over_tcp=True) as pool,
            place.connect("alice", over_tcp=True) as client,
            pool.open_publisher(a_teacher("guarded"), transports=STREAM) as teacher,
            client.open_session(a_student("guarded", transports=STREAM)) as session,
        ):
            with teacher.reserve(0, input_ids=ids, lengths=lengths) as draft:
                tl.select_top_k(logits, out=draft)
            with session.acquire(step=0, input_ids=ids, lengths=lengths) as batch:
                assert same(batch.columns, expected(ids, lengths, logits))

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ({}, "TOKEN_MISSING"),
            ({"token": "wrong-0123456789abcdef"}, "TOKEN_UNKNOWN"),
            ({"token": TOKENS["alice"][:-1]}, "TOKEN_UNKNOWN"),
        ],
        ids=["none", "another", "the beginning of one"],
    )
    def test_a_wrong_one_opens_nothing(
        self, place: Guarded, given: dict[str, str], reason: str
    ) -> None:
        # Health is everybody's, so it is the session that is refused.
        with tl.connect(place.unix, **given, timeout=SECONDS) as client:  # type: ignore[arg-type]
            with place.counts("rpc", "UNKNOWN_CALLER"):
                with pytest.raises(UnknownCallerError) as caught:
                    client.open_session(a_profile())
        assert caught.value.facts["reason"] == reason
        assert TOKENS["alice"] not in str(caught.value)

    def test_one_that_was_taken_out_of_the_file_is_none_from_the_next_call_on(
        self, place: Guarded
    ) -> None:
        others = {name: token for name, token in TOKENS.items() if name != "bob"}
        with place.connect("bob") as client:
            write_tokens(place.folder / "tokens", others)
            try:
                with pytest.raises(UnknownCallerError):
                    client.open_session(a_profile())
                (place.folder / "tokens").chmod(0o644)  # what others may read is not taken
                (place.folder / "tokens").write_text(f"student {TOKENS['bob']}\n")
                with pytest.raises(UnknownCallerError):
                    client.open_session(a_profile())
            finally:
                write_tokens(place.folder / "tokens", TOKENS)
            client.open_session(a_profile()).close()
        assert "open to other users (mode 0644)" in place.server.log_text()

    def test_none_is_in_the_log(self, place: Guarded) -> None:
        log = place.server.log_text()
        assert not any(token in log for token in TOKENS.values())


class TestRoles:
    @pytest.mark.parametrize("method", [*REGISTRY, *OPERATOR], ids=str)
    def test_a_student_reaches_no_registry_and_no_operators_call(
        self, place: Guarded, channel: grpc.Channel, method: Method
    ) -> None:
        with place.counts("rpc", "NOT_ALLOWED"):
            assert code_of(lambda: call(channel, method, "alice")) is Code.PERMISSION_DENIED

    @pytest.mark.parametrize("method", [*SCORING, *OPERATOR], ids=str)
    def test_a_publisher_scores_nothing_and_reclaims_nothing(
        self, place: Guarded, channel: grpc.Channel, method: Method
    ) -> None:
        with place.counts("rpc", "NOT_ALLOWED"):
            assert code_of(lambda: call(channel, method, "pool")) is Code.PERMISSION_DENIED

    def test_an_operator_is_no_student(self, place: Guarded) -> None:
        with place.connect("ops") as client, place.counts("rpc", "NOT_ALLOWED"):
            with pytest.raises(
                NotAllowedError, match="for the role student, and the token shown has operator:"
            ):
                client.open_session(a_profile())

    def test_an_upload_is_refused_before_it_is_read(
        self, place: Guarded, channel: grpc.Channel
    ) -> None:
        upload = channel.stream_unary(WRITE_PAYLOAD, bytes, bytes)
        chunks = iter([b"\0" * 65536] * 4)

        def send() -> None:
            upload(chunks, timeout=SECONDS, metadata=shown("alice"))

        with place.counts("rpc", "NOT_ALLOWED"):
            assert code_of(send) is Code.PERMISSION_DENIED


class TestCommands:
    def test_inspect_and_top_come_by_their_flags_and_show_how(
        self, place: Guarded, capsys: pytest.CaptureFixture[str]
    ) -> None:
        token, tls = place.folder / "ops-token", place.papers.tls
        token.touch(mode=0o600)
        token.write_text(TOKENS["ops"])
        files = ("--tls-ca", tls.ca, "--tls-cert", tls.cert, "--tls-key", tls.key)
        flags = [place.tcp, *map(str, (*files, "--token-file", token))]
        assert inspect([*flags, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["epoch"], told["address"]) == (place.view().epoch, f"tls://{place.tcp}")
        assert top([*flags, "--once", "--interval", "0.1"]) == 0
        assert f"tls://{place.tcp}" in capsys.readouterr().out

    def test_inspect_says_what_is_wrong_with_tls(self, place: Guarded) -> None:
        with pytest.raises(ConfigError) as caught:
            inspect([place.tcp])
        assert caught.value.facts["reason"] == "TLS_EXPECTED"


class TestOthersSessions:
    @pytest.fixture
    def session(self, place: Guarded) -> Iterator[tl.Session]:
        """Alice's, streamed: a remote one."""
        with place.connect("alice") as client:
            with client.open_session(a_profile(transports=STREAM)) as opened:
                yield opened

    def test_another_callers_lease_cannot_be_read_returned_or_renewed(
        self, place: Guarded, channel: grpc.Channel, session: tl.Session
    ) -> None:
        session_id = session.terms.session_id
        raw = call(channel, SCORING[0], "alice", _fields(a_request(session_id)))
        lease_id = scoring_service_pb2.ScoreResponse.FromString(raw).lease.lease_id
        read, named = (
            methods_of(bulk_service_pb2)[0],
            {"session_id": session_id, "lease_id": lease_id},
        )
        with place.counts("rpc", "NOT_ALLOWED", times=4):
            stream = channel.unary_stream(read.path, bytes, bytes)
            request = read.request(**named).SerializeToString()
            reading = stream(request, timeout=SECONDS, metadata=shown("bob"))
            assert code_of(lambda: list(reading)) is Code.PERMISSION_DENIED
            for name in ("ReleasePayload", "RenewSession", "CloseSession"):
                ask = partial(call, channel, student_method(name), "bob", named)
                assert code_of(ask) is Code.PERMISSION_DENIED
        mine = stream(request, timeout=SECONDS, metadata=shown("alice"))
        assert list(mine)  # it is there as before
        call(channel, student_method("ReleasePayload"), "alice", named)

    def test_a_lease_of_another_session_is_none_of_ones_own(
        self, place: Guarded, channel: grpc.Channel, session: tl.Session
    ) -> None:
        with place.connect("bob") as client:
            with client.open_session(a_profile(transports=STREAM)) as own:
                with session.score(ROWS).result(timeout=SECONDS) as payload:
                    (lease,) = [each.lease_id for each in place.view().leases]
                    named = {"session_id": own.terms.session_id, "lease_id": lease}
                    read = methods_of(bulk_service_pb2)[0]
                    request = read.request(**named).SerializeToString()
                    stream = channel.unary_stream(read.path, bytes, bytes)
                    with place.counts("rpc", "NOT_ALLOWED", times=2):
                        reading = stream(request, timeout=SECONDS, metadata=shown("bob"))
                        assert code_of(lambda: list(reading)) is Code.PERMISSION_DENIED
                        release = partial(call, channel, student_method("ReleasePayload"), "bob")
                        assert code_of(lambda: release(named)) is Code.PERMISSION_DENIED
                    assert [each.lease_id for each in place.view().leases] == [lease]
                    assert len(payload.row_offsets) == len(ROWS) + 1

    def test_a_request_id_of_another_caller_gives_no_session(
        self, place: Guarded, channel: grpc.Channel
    ) -> None:
        profile = a_profile(transports=STREAM)
        opened = open_raw(channel, profile, "the-same")
        with place.counts("rpc", "NOT_ALLOWED"):
            ask = partial(call, channel, student_method("OpenSession"), "bob")
            again = opening(profile, "the-same")
            assert code_of(lambda: ask(again)) is Code.PERMISSION_DENIED
        close_raw(channel, opened)

    @pytest.mark.parametrize("secret", ["", "x" * 43], ids=["none", "another"])
    def test_a_local_sessions_calls_show_the_secret_of_its_line(
        self, place: Guarded, channel: grpc.Channel, secret: str
    ) -> None:
        renew = student_method("RenewSession")
        with place.connect("alice") as client, client.open_session(a_profile()) as session:
            assert session.transport is tl.Transport.SHARED_MEMORY
            named = {"session_id": session.terms.session_id}
            with place.counts("rpc", "NOT_ALLOWED"):
                refused = code_of(lambda: call(channel, renew, "alice", named, secret=secret))
                assert refused is Code.PERMISSION_DENIED
            with session.score(ROWS).result(timeout=SECONDS) as payload:
                assert len(payload.row_offsets) == len(ROWS) + 1


class TestTls:
    def connect(self, place: Guarded, tls: tl.Tls | None, address: str = "") -> TeacherLogitsError:
        with pytest.raises(TeacherLogitsError) as caught:
            tl.connect(
                address or place.tcp,
                tls=tls,
                token=TOKENS["alice"],
                insecure=tls is None,
                timeout=SECONDS,
            ).close()
        return caught.value

    def test_plaintext_to_its_port_is_told_to_speak_it(self, place: Guarded) -> None:
        before = place.refusals().get(("tls", "NOT_TLS"), 0)
        error = self.connect(place, None)
        assert isinstance(error, ConfigError)
        assert error.facts["reason"] == "TLS_EXPECTED"
        place.wait_for_more("tls", "NOT_TLS", before)

    def test_tls_to_a_port_without_is_told_so(self, place: Guarded) -> None:
        plain = grpc.server(ThreadPoolExecutor(1))
        port = plain.add_insecure_port("127.0.0.1:0")
        plain.start()
        tls = tl.Tls(ca=place.papers.tls.ca)
        error = self.connect(place, tls, f"localhost:{port}")
        plain.stop(None).wait()
        assert isinstance(error, ConfigError)
        assert error.facts["reason"] == "TLS_NOT_SPOKEN"

    def test_a_server_that_nobody_we_believe_signed_for_is_refused(self, place: Guarded) -> None:
        tls = replace(place.papers.tls, ca=place.strangers.tls.ca)
        error = self.connect(place, tls)
        assert isinstance(error, ConfigError)
        assert error.facts["reason"] == "CERTIFICATE_UNTRUSTED"

    def test_a_server_of_another_name_is_refused(self, place: Guarded) -> None:
        error = self.connect(place, replace(place.papers.tls, server_name="node7.example"))
        assert error.facts["reason"] == "CERTIFICATE_NAME"
        assert "'node7.example'" in error.message

    @pytest.mark.parametrize(
        ("whose", "reason"),
        [("nobody's", "CLIENT_CERTIFICATE_MISSING"), ("theirs", "CLIENT_CERTIFICATE_REFUSED")],
    )
    def test_a_client_with_no_certificate_that_the_server_believes_is_refused(
        self, place: Guarded, whose: str, reason: str
    ) -> None:
        theirs = place.strangers.tls
        ours = tl.Tls(ca=place.papers.tls.ca)
        tls = ours if whose == "nobody's" else replace(ours, cert=theirs.cert, key=theirs.key)
        before = place.refusals().get(("tls", reason), 0)
        error = self.connect(place, tls)
        assert isinstance(error, UnknownCallerError)
        assert error.facts["reason"] == "CLIENT_CERTIFICATE_REFUSED"
        place.wait_for_more("tls", reason, before)

    def test_certificates_are_read_anew_and_one_that_ran_out_is_refused(
        self, place: Guarded
    ) -> None:
        past = datetime.now(timezone.utc) - timedelta(days=1)
        place.papers.certify("localhost", not_before=past - timedelta(days=9), not_after=past)
        try:
            error = self.connect(place, place.papers.tls)
        finally:
            place.papers.certify("localhost", "127.0.0.1")
        assert isinstance(error, ConfigError)
        assert error.facts["reason"] == "CERTIFICATE_EXPIRED"
        with place.connect("alice", over_tcp=True) as client:
            client.open_session(a_profile()).close()

    def test_where_nobody_listens_it_is_said_as_ever(self, place: Guarded) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            nobody = f"localhost:{taken.getsockname()[1]}"
            with pytest.raises(ServerUnreachableError):
                tl.connect(nobody, tls=place.papers.tls, timeout=0.3)


class TestTheBroker:
    @pytest.mark.skipif("os.geteuid() != 0", reason="takes another user's process")
    def test_a_user_who_may_connect_and_is_not_on_the_list_maps_nothing(
        self, place: Guarded, channel: grpc.Channel
    ) -> None:
        opened = open_raw(channel, a_profile(), "as-nobody")
        packet = hello_of(opened).hex()
        with place.counts("line", "NOT_ALLOWED"):
            command = [sys.executable, str(HELLO_AS), str(NOBODY), opened.broker, packet]
            done = forked.run(command, timeout=SECONDS)
            assert done.returncode == 0, done.stderr
            error = error_of(line_pb2.LineReply.FromString(bytes.fromhex(done.stdout)))
        assert isinstance(error, NotAllowedError)
        assert error.facts == {"uid": NOBODY, "reason": "BROKER_REFUSED"}
        assert f"--allow-uid {NOBODY}" in error.message
        close_raw(channel, opened)

    def test_a_nonce_that_was_shown_opens_no_second_line(
        self, place: Guarded, channel: grpc.Channel
    ) -> None:
        opened = open_raw(channel, a_profile(), "replayed")
        line, reply = say(opened.broker, hello_of(opened))
        with line:
            assert reply.hello.secret
            with place.counts("line", "NOT_ALLOWED"):
                again, refused = say(opened.broker, hello_of(opened))
                again.close()
            assert error_of(refused).facts["reason"] == "NONCE_SPENT"
            close_raw(channel, opened, reply.hello.secret)  # the first line's session lives on

    def test_who_does_not_say_that_it_will_show_a_secret_is_asked_for_none(
        self, place: Guarded, channel: grpc.Channel
    ) -> None:
        opened = open_raw(channel, a_profile(), "of-the-first-release")
        line, reply = say(opened.broker, hello_of(opened, shows_secret=False))
        with line:
            assert not reply.hello.secret
            close_raw(channel, opened)

    def test_a_secret_whose_line_is_gone_before_all_was_settled_is_asked_for_no_more(
        self, place: Guarded, channel: grpc.Channel
    ) -> None:
        # The hello's answer may have been lost: its client goes on, and is streamed to.
        opened = open_raw(channel, a_profile(), "lost")
        line, _ = say(opened.broker, hello_of(opened))
        line.close()
        prove, until = student_method("ProveLocality"), time.monotonic() + SECONDS
        settled = b""
        while not settled:  # the broker hears of the line's end in a moment
            assert time.monotonic() < until
            with contextlib.suppress(grpc.RpcError):
                settled = call(channel, prove, "alice", {"session_id": opened.session_id})
        answer = teacher_logits_service_pb2.ProveLocalityResponse.FromString(settled)
        (settlement,) = answer.session.transports
        assert settlement.transport == transport_to_wire(tl.Transport.STREAM)
        close_raw(channel, opened)

    def test_a_nonce_of_ones_own_making_opens_none(
        self, place: Guarded, channel: grpc.Channel
    ) -> None:
        opened = open_raw(channel, a_profile(), "guessed")
        with place.counts("line", "NOT_ALLOWED"):
            line, refused = say(opened.broker, hello_of(opened._replace(nonce=bytes(32))))
            line.close()
        assert error_of(refused).facts["reason"] == "NONCE_WRONG"
        close_raw(channel, opened)


class TestForgedHints:
    def test_a_forged_host_name_and_boot_id_make_nobody_local(
        self, place: Guarded, channel: grpc.Channel
    ) -> None:
        forged = replace(node_hints(), pid=place.server.pid)
        wanted = (tl.Transport.SHARED_MEMORY, tl.Transport.STREAM)
        profile = a_profile(hints=forged, transports=wanted, locality=tl.Locality.REQUIRE)
        opened = open_raw(channel, profile, "forged")
        prove = student_method("ProveLocality")
        before = place.refusals().get(("rpc", "SESSION_REFUSED"), 0)
        named = {"session_id": opened.session_id, "proofs": [_proof(bytes(32))]}
        refused = code_of(lambda: call(channel, prove, "alice", named))
        assert refused is Code.FAILED_PRECONDITION
        assert place.refusals()["rpc", "SESSION_REFUSED"] == before + 1
        assert opened.session_id not in [each.session_id for each in place.view().sessions]

    def test_they_are_streamed_to_where_that_is_taken(self, place: Guarded) -> None:
        # The broker is out of reach, as on another machine, though the hints are this one's.
        broker = place.folder / "s.broker"
        aside = broker.with_name("aside")
        broker.rename(aside)
        try:
            with place.connect("alice", over_tcp=True) as client:
                with client.open_session(a_profile(hints=node_hints())) as session:
                    reasons = {each.transport: each.reason for each in session.refusals}
                    assert session.transport is tl.Transport.STREAM
                    with session.score(ROWS).result(timeout=SECONDS) as payload:
                        assert len(payload.row_offsets) == len(ROWS) + 1
        finally:
            aside.rename(broker)
        assert reasons[tl.Transport.SHARED_MEMORY] is RefusalReason.BROKER_UNREACHABLE


class TestSlabs:
    def test_a_student_writes_to_none_by_whatever_way(
        self, place: Guarded, channel: grpc.Channel
    ) -> None:
        opened = open_raw(channel, a_profile(), "writes")
        line = Line(opened.broker, timeout=SECONDS)
        challenge = line.hello(opened.session_id, opened.nonce, timeout=SECONDS)
        mac = proof_of(challenge, nonce=opened.nonce, transport=tl.Transport.SHARED_MEMORY)
        proof = _proof(mac)
        prove = student_method("ProveLocality")
        shows = partial(call, channel, secret=line.secret)
        shows(prove, "alice", {"session_id": opened.session_id, "proofs": [proof]})
        raw = shows(SCORING[0], "alice", _fields(a_request(opened.session_id)))
        lease = scoring_service_pb2.ScoreResponse.FromString(raw).lease
        slab = line.get_slab(lease.slab.extent.slab_id, SECONDS)
        before = os.pread(slab.descriptor, slab.size_bytes, 0)

        anew = os.open(f"/proc/self/fd/{slab.descriptor}", os.O_RDWR)
        readable = mmap.mmap(anew, slab.size_bytes, prot=mmap.PROT_READ)
        for fd in (slab.descriptor, anew):
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", lease.slab.extent.offset_bytes)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, slab.size_bytes, flags=mmap.MAP_SHARED)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
        assert not _made_writable(readable)
        copied = mmap.mmap(anew, slab.size_bytes, flags=mmap.MAP_PRIVATE)
        copied[:] = bytes(slab.size_bytes)  # which nobody else sees

        assert os.pread(slab.descriptor, slab.size_bytes, 0) == before
        readable.close()
        copied.close()
        os.close(anew)
        os.close(slab.descriptor)
        line.close()


def _made_writable(shared: mmap.mmap) -> bool:
    """Try to be let write to a shared map that was made for reading."""
    address = np.frombuffer(shared, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    both = mmap.PROT_READ | mmap.PROT_WRITE
    return bool(libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(shared)), both) == 0)


def _proof(mac: bytes) -> teacher_logits_service_pb2.LocalityProof:
    return teacher_logits_service_pb2.LocalityProof(
        transport=transport_to_wire(tl.Transport.SHARED_MEMORY), writer_id="server", mac=mac
    )


def _fields(message: object) -> dict[str, object]:
    return {field.name: value for field, value in message.ListFields()}  # type: ignore[attr-defined]
