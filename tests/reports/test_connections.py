"""Who is connected, from where, and for how long: R02, R34, T08, T24, T31, T32."""

import dataclasses
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests import forked
from tests.processes.running import line_of
from tests.reports.raw import OUR_METHODS, connect_raw
from tests.reports.tunnels import tunnel
from tests.transport_suite.contents import every_kind
from tests.transport_suite.writing import PATIENCE_SECONDS, Embedded, a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits.errors import NoCommonTransportError, PayloadInvalidError, SessionRefusedError
from teacher_logits.layout import ElementType
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.transport import RefusalReason
from teacher_logits_client.sessions.agreement import node_hints

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
STREAMS = 50
SHARED = (tl.Transport.CUDA_IPC, tl.Transport.SHARED_MEMORY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    with embedded_server(tmp_path_factory.mktemp("near"), pool_bytes=32 * MIB) as running:
        yield running


# R02, T08: who says that it is here, and is not


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """A server that is reached by its port alone, as from another node.

    The broker's socket is not where it says that it is: what a container without the folder
    sees, or another machine.
    """
    folder = tmp_path_factory.mktemp("far")
    with embedded_server(
        folder, pool_bytes=MIB, listen=("127.0.0.1:0",), insecure=True, broker=str(folder / "b")
    ) as server:
        (folder / "b").rename(folder / "on another node")
        yield server


@pytest.fixture(scope="module")
def elsewhere(far: Embedded) -> Iterator[tl.Client]:
    """A client on another node."""
    with tl.connect(far.address) as client:
        yield client


def test_r02_a_student_on_another_node_is_streamed_to_and_told_why(elsewhere: tl.Client) -> None:
    with elsewhere.open_session(a_profile(transports=(*SHARED, tl.Transport.STREAM))) as session:
        assert session.transport is tl.Transport.STREAM
        reasons = {refusal.transport: refusal.reason for refusal in session.refusals}
        assert reasons == {
            tl.Transport.CUDA_IPC: RefusalReason.NOT_OFFERED,
            tl.Transport.SHARED_MEMORY: RefusalReason.BROKER_UNREACHABLE,
        }
        with session.score([[1, 2, 3]]).result() as leased:
            assert leased.transport is tl.Transport.STREAM


def test_r02_a_student_on_another_node_that_insists_is_refused_with_the_shard(
    elsewhere: tl.Client,
) -> None:
    profile = a_profile(transports=(*SHARED, tl.Transport.STREAM), locality=tl.Locality.REQUIRE)
    with pytest.raises(SessionRefusedError) as caught:
        elsewhere.open_session(profile)
    assert "BROKER_UNREACHABLE" in caught.value.message
    assert "server" in caught.value.message  # the writer whose shard it is


@pytest.mark.parametrize("locality", list(tl.Locality))
def test_t08_the_servers_own_name_boot_id_and_namespaces_open_nothing(
    elsewhere: tl.Client, locality: tl.Locality
) -> None:
    """What NeMo RL believes. It would come to memory that this student cannot map."""
    forged = dataclasses.replace(node_hints(), pid=1)
    profile = a_profile(hints=forged, transports=SHARED, locality=locality)
    with pytest.raises((NoCommonTransportError, SessionRefusedError)):
        elsewhere.open_session(profile)


@pytest.mark.parametrize("locality", [tl.Locality.PREFER, tl.Locality.REQUIRE])
def test_t08_a_brokers_packets_through_a_tunnel_lack_what_proves(
    tmp_path: Path, locality: tl.Locality
) -> None:
    """The hello is answered, word for word; the descriptor beside it stays behind."""
    broker, hidden = tmp_path / "b", tmp_path / "on another node"
    profile = a_profile(
        hints=node_hints(),
        transports=(tl.Transport.SHARED_MEMORY, tl.Transport.STREAM),
        locality=locality,
    )
    with embedded_server(
        tmp_path, pool_bytes=MIB, listen=("127.0.0.1:0",), insecure=True, broker=str(broker)
    ) as server:
        broker.rename(hidden)
        with (
            tunnel(broker, hidden, kind=socket.SOCK_SEQPACKET),
            tl.connect(server.address) as client,
        ):
            if locality is tl.Locality.REQUIRE:
                with pytest.raises(SessionRefusedError, match="SLAB_NOT_MAPPABLE"):
                    client.open_session(profile)
                return
            with client.open_session(profile) as session:
                (refusal,) = session.refusals
                assert session.transport is tl.Transport.STREAM
                assert refusal.reason is RefusalReason.SLAB_NOT_MAPPABLE
                assert "0 descriptors" in refusal.message


# R34: ids alone, and temperatures that are said


def test_r34_no_call_takes_text_to_be_tokenised(server: Embedded) -> None:
    names = {
        field.name
        for method in OUR_METHODS
        for field in method.descriptor.input_type.fields
        if field.type == field.TYPE_STRING
    }
    assert all(name.endswith(("_id", "_ids")) for name in names - {"digest", "features"}), names
    with (
        tl.connect(server.address) as client,
        client.open_session(a_profile(top_k=8)) as session,
    ):
        for text in ("a text", ["a text", "another"]):
            with pytest.raises(PayloadInvalidError):
                session.score(text)  # type: ignore[arg-type]


# T24: a reader's end takes nothing from another

READS_AND_ENDS = """
import sys
import teacher_logits_client as tl
from tests.transport_suite.writing import a_profile
client = tl.connect(sys.argv[1])
session = client.open_session(a_profile(top_k=8, transports=(tl.Transport.SHARED_MEMORY,)))
leased = session.acquire(payload_id=sys.argv[2])
print(leased.digest())
"""


def test_t24_what_one_process_mapped_stays_there_for_the_next(server: Embedded) -> None:
    profile = a_profile(top_k=8, transports=(tl.Transport.SHARED_MEMORY,))
    with (
        tl.connect(server.address) as client,
        client.open_session(profile) as session,
        session.score([[1, 2, 3], [4, 5]]).result() as leased,
    ):
        ended = forked.run(
            [sys.executable, "-c", READS_AND_ENDS, server.address, leased.payload.payload_id],
            cwd=ROOT,
            timeout=2 * PATIENCE_SECONDS,
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip() == leased.digest()
        with session.acquire(payload_id=leased.payload.payload_id) as again:
            assert again.digest() == leased.digest()


# T31: pings


def test_t31_a_client_that_pings_often_is_answered_and_not_sent_away(far: Embedded) -> None:
    """Twenty pings at once, and no call: a server with gRPC's defaults sends GOAWAY at the fifth.

    In HTTP/2's own frames, since gRPC's clients send no more than one ping a second.
    """
    host, _, port = far.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), PATIENCE_SECONDS) as connection,
        connection.makefile("rb") as answers,
    ):
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, b""))
        for number in range(20):
            said = struct.pack(">Q", number)
            connection.sendall(frame(PING, said))
            assert pong(answers) == said


SETTINGS, PING, GOAWAY = 4, 6, 7


def frame(kind: int, body: bytes) -> bytes:
    """Return a frame of HTTP/2 about the connection as a whole."""
    return len(body).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + body


def pong(answers: BinaryIO) -> bytes:
    """Return what the next answer to a ping says, past frames about something else."""
    while True:
        head = answers.read(9)
        assert len(head) == 9, "the server hung up"
        body = answers.read(int.from_bytes(head[:3], "big"))
        assert head[3] != GOAWAY, body
        if head[3] == PING and head[4] & 1:
            return body


# T32: fifty readers die in the middle

READS_FIFTY = """
import sys
import grpc
from teacher_logits.v1 import bulk_service_pb2, bulk_service_pb2_grpc
address, session_id, *lease_ids = sys.argv[1:]
streams = []
for lease_id in lease_ids:
    channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    request = bulk_service_pb2.ReadPayloadRequest(session_id=session_id, lease_id=lease_id)
    streams.append((channel, bulk_service_pb2_grpc.BulkServiceStub(channel).ReadPayload(
        request, timeout=300)))
for channel, stream in streams:
    assert next(stream).data
print("reading", flush=True)
sys.stdin.read()
"""


def test_t32_fifty_readers_that_are_killed_hold_up_nobody_and_keep_nothing(
    tmp_path: Path,
) -> None:
    content = every_kind(top_k=1024, windows=((0, 1000),), element_type=ElementType.FLOAT32)
    with embedded_server(tmp_path, pool_bytes=64 * MIB) as server:
        ledger = server.core.ledger
        held = server.seal(content)
        session_id = ledger.open_session(
            request_id="fifty",
            protocol_version=PROTOCOL_VERSION,
            profile=a_profile(top_k=1024, temperatures=(2.0,), transports=(tl.Transport.STREAM,)),
        ).terms.session_id
        ledger.prove_locality(session_id, proofs={}, failures=[])
        lease_ids = [
            ledger.acquire(
                session_id=session_id,
                request_id=f"read-{number}",
                payload_id=held.payload.payload_id,
            ).lease_id
            for number in range(STREAMS)
        ]
        readers: subprocess.Popen[str] = forked.Popen(
            [sys.executable, "-c", READS_FIFTY, server.address, session_id, *lease_ids],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert line_of(readers) == "reading"
            assert_answers(server)
        finally:
            readers.kill()
            readers.communicate()
        assert_answers(server)
        held.release()
        ledger.close_session(session_id)  # as its TTL would; what a stream reads stays till its end
        server.wait_until(lambda: server.usage.used_bytes == 0)
        assert_answers(server)


def assert_answers(server: Embedded) -> None:
    """Health and what a client asks for are answered."""
    with connect_raw(server.address) as raw, grpc.insecure_channel(server.address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        assert answer.status == answer.SERVING
        assert raw.inspect().epoch == server.core.ledger.epoch
    with tl.connect(server.address) as client, client.open_session(a_profile(top_k=8)) as session:
        session.score([[1, 2, 3]]).result().close()
