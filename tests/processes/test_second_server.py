"""A second server at the address of a first is refused by name, and the first serves on."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.student import ROWS, a_profile
from tests.transport_suite.dense_teacher import DenseTeacher

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError
from teacher_logits_client import Transport
from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig

USAGE = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first")


@pytest.fixture(scope="module")
def first(folder: Path) -> Iterator[tl.testing.ServerProcess]:
    """A server on a Unix socket and on a port."""
    both = [f"unix:{folder / 's'}", "127.0.0.1:0"]
    with tl.testing.serve(listen=both, insecure=True) as server:
        yield server


def refusal_of_a_second(**settings: object) -> ConfigError:
    """Start a server in this process that must not come up."""
    config = ServerConfig(insecure=True, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught, serve_in_thread(config, DenseTeacher()):
        pass
    return caught.value


def assert_serves(address: str, transport: Transport) -> None:
    """Whoever calls there is answered."""
    with tl.connect(address) as client, client.open_session(a_profile(transport)) as session:
        assert session.transport is transport
        session.score(ROWS).result().close()


def test_on_the_same_socket_it_is_refused_with_the_firsts_pid(
    first: tl.testing.ServerProcess,
) -> None:
    with pytest.raises(ConfigError) as caught, tl.testing.serve(listen=first.address):
        pass
    assert caught.value.facts["exit_code"] == USAGE
    assert f"pid {first.pid} has this socket" in caught.value.message
    assert first.address.removeprefix("unix:") in caught.value.message
    assert_serves(first.address, Transport.SHARED_MEMORY)


def test_on_the_same_port_it_is_refused_with_the_address(
    first: tl.testing.ServerProcess, tmp_path: Path
) -> None:
    _, port = addresses_of(first)
    refusal = refusal_of_a_second(listen=(f"unix:{tmp_path / 's'}", port))
    assert f"--listen {port}: Address already in use" in refusal.message
    assert list(tmp_path.iterdir()) == []  # the socket that it could have is given back
    assert_serves(port, Transport.STREAM)


def test_with_the_same_broker_it_is_refused_with_the_firsts_pid(
    first: tl.testing.ServerProcess, tmp_path: Path
) -> None:
    broker = str(first.readiness["broker"])
    refusal = refusal_of_a_second(listen=(f"unix:{tmp_path / 's'}",), broker=broker)
    assert f"--broker {broker}: the server with pid {first.pid} has this socket" in refusal.message
    assert_serves(first.address, Transport.SHARED_MEMORY)


def test_on_the_port_of_somebody_else_it_is_refused_too(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refusal = refusal_of_a_second(listen=(f"127.0.0.1:{port}",), broker=str(tmp_path / "b"))
    assert f"--listen 127.0.0.1:{port}: Address already in use" in refusal.message


def addresses_of(server: tl.testing.ServerProcess) -> tuple[str, str]:
    """The Unix socket and the port of a server."""
    addresses = server.readiness["addresses"]
    assert isinstance(addresses, list)
    unix, port = addresses
    return unix, port
