"""systemd hears that a server is ready and that it stops, where it asked (`Type=notify`)."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest
from tests import forked

from teacher_logits_server.readiness import READY, tell_systemd

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_SECONDS = 30
TOY = "teacher_logits_client.testing:toy_teacher"


def listening(address: str) -> socket.socket:
    """systemd's end."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    line.settimeout(PATIENCE_SECONDS)
    line.bind(address)
    return line


def test_a_server_says_that_it_is_ready_and_then_that_it_stops(tmp_path: Path) -> None:
    with listening(f"{tmp_path}/notify") as systemd:
        command = [sys.executable, "-m", "teacher_logits", "serve", "--engine", TOY]
        command += ["--listen", f"unix:{tmp_path}/s", "--pool-size", "1MiB"]
        environment = {**os.environ, "NOTIFY_SOCKET": f"{tmp_path}/notify"}
        server = forked.Popen(command, env=environment, stderr=forked.DEVNULL)
        try:
            assert systemd.recv(64) == b"READY=1"
            server.send_signal(signal.SIGTERM)
            assert systemd.recv(64) == b"STOPPING=1"
            assert server.wait(PATIENCE_SECONDS) == 0
        finally:
            server.kill()
            server.wait()


def test_an_abstract_socket_is_named_with_an_at_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"teacher-logits-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
    with listening(f"\0{name}") as systemd:
        tell_systemd(READY)
        assert systemd.recv(64) == b"READY=1"


@pytest.mark.parametrize("said", ["", "/nowhere/notify"])
def test_nobody_who_asks_and_a_socket_that_is_gone_are_no_failure(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", said)
    tell_systemd(READY)
