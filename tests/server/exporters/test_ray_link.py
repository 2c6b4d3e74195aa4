"""Settings of a Ray cluster that cannot be served with are refused before anything starts."""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from tests.held import open_descriptors

from teacher_logits.errors import ConfigError
from teacher_logits_server.config import ServerConfig
from teacher_logits_server.exporters import ray_link
from teacher_logits_server.exporters.ray_link import join_cluster
from teacher_logits_server.ray_address import check_listening, no_cluster

if TYPE_CHECKING:
    from teacher_logits_server.exporters.ray_channel import Message


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"--ray-address auto: .*teacher-logits\[ray\]"):
        join_cluster(ServerConfig(ray_address="auto"))


def test_an_address_at_which_nobody_listens_is_refused_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]

    with pytest.raises(ConfigError, match=f"--ray-address 127.0.0.1:{port}: nobody listens"):
        join_cluster(ServerConfig(ray_address=f"127.0.0.1:{port}"))


@pytest.mark.parametrize(("address", "advised"), [("auto", False), ("127.0.0.1:1", True)])
def test_auto_is_advised_to_who_did_not_say_it(address: str, advised: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        check_listening(address, found="127.0.0.1:1")
    for said in (caught.value.message, no_cluster(address, "nothing").message):
        assert (", or auto for one that runs here" in said) == advised
        assert said.count("auto") == 1


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "ray://head"])
def test_an_address_of_ray_client_is_refused_with_the_form_that_is_wanted(address: str) -> None:
    with pytest.raises(ConfigError, match=f"--ray-address {address}: is Ray Client's: give host"):
        join_cluster(ServerConfig(ray_address=address))


@pytest.mark.parametrize(
    ("child", "said"),
    [
        ("raise SystemExit", "did not come to an end"),
        (
            "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.recv(9999); "
            """s.send(b'{"op": "refused", "said": "ConnectionError: none here"}')""",
            "none here.*RAY_AUTH_MODE=token",
        ),
    ],
    ids=["dies", "refuses"],
)
def test_a_process_that_cannot_join_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, child: str, said: str
) -> None:
    monkeypatch.setattr(ray_link, "command", lambda: [sys.executable, "-c", child])
    before = open_descriptors()

    with pytest.raises(ConfigError, match=said):
        join_cluster(ServerConfig(ray_address="auto"))
    assert open_descriptors() == before


def test_a_budget_above_rays_threshold_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = (
        "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.recv(9999); "
        """s.send(b'{"op": "joined", "store_bytes": 10000, "most_bytes": 8000}'); s.recv(1)"""
    )
    monkeypatch.setattr(ray_link, "command", lambda: [sys.executable, "-c", child])

    with pytest.raises(ConfigError, match=r"--ray-budget 9000: .*spills to disk above 8000"):
        join_cluster(ServerConfig(ray_address="auto", ray_budget_bytes=9000))


JOINED = (
    "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.recv(9999); "
    """s.send(b'{"op": "joined", "store_bytes": 10000, "most_bytes": 8000}'); """
)


@pytest.mark.parametrize("then", ["s.recv(1)", 's.send(b"{}"); s.recv(1)'], ids=["silent", "spoke"])
def test_a_process_that_falls_silent_comes_to_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(ray_link, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(ray_link, "command", lambda: [sys.executable, "-c", JOINED + then])
    link = join_cluster(ServerConfig(ray_address="auto"))
    is_lost = threading.Event()
    link.listen(lambda _: None, is_lost.set)
    assert is_lost.wait(30)
    link.stop()


def test_what_cannot_be_understood_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = JOINED + 's.send(b"{}"); s.recv(1)'
    monkeypatch.setattr(ray_link, "command", lambda: [sys.executable, "-c", child])
    link = join_cluster(ServerConfig(ray_address="auto"))
    is_lost = threading.Event()

    def hear(message: Message) -> None:
        raise KeyError("object")

    link.listen(hear, is_lost.set)
    assert is_lost.wait(30)
    link.stop()
    assert "the Ray process was not understood" in caplog.text
