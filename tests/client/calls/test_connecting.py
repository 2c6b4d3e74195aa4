"""Connecting: what a client is told of a socket that it may not connect to."""

import os
import re
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import teacher_logits_client as tl
from teacher_logits.addresses import Address
from teacher_logits.errors import ConfigError
from teacher_logits_client.calls import shut_sockets

NOBODY = 65534


@contextmanager
def listening(folder: Path, *, mode: int) -> Iterator[Path]:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(mode)
        yield path


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("mode", [0o600, 0o666], ids=["kept out", "let in"])
def test_a_user_whom_a_socket_keeps_out_is_found(tmp_path: Path, mode: int) -> None:
    with listening(tmp_path, mode=mode):
        tmp_path.chmod(0o711)
        pid = os.fork()
        if pid == 0:
            answer = 2
            try:
                os.chdir(tmp_path)  # the folders above let nobody else in
                os.setuid(NOBODY)
                answer = int(shut_sockets.is_kept_out("s"))
            finally:
                os._exit(answer)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (mode == 0o600)


SHUT_OUT = """
import os, sys
import teacher_logits_client as tl
connect, refused = tl.connect, tl.errors.ConfigError  # they are imported here
os.setuid(int(sys.argv[2]))
try:
    connect(sys.argv[1], timeout=3600)
except refused as error:
    facts = error.facts
    print(facts["reason"], facts["path"], facts["mode"], facts["uid"], facts["owner"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(("folder_mode", "mode"), [(0o711, 0o600), (0o700, 0o666)])
def test_it_is_told_which_place_keeps_it_out_and_waits_for_nothing(
    folder_mode: int, mode: int
) -> None:
    with tempfile.TemporaryDirectory() as name, listening(Path(name), mode=mode) as path:
        Path(name).chmod(folder_mode)
        command = [sys.executable, "-c", SHUT_OUT, str(path), str(NOBODY)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    where, what = (name, "0700") if folder_mode == 0o700 else (str(path), "0600")
    assert said == ["SOCKET_SHUT", where, what, str(NOBODY), "0"]


@pytest.mark.parametrize("looks", [[True, True], [True, False]], ids=["shut", "just opened"])
def test_it_is_looked_at_twice_for_a_server_that_is_just_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[bool]
) -> None:
    given = iter(looks)
    monkeypatch.setattr(shut_sockets, "is_kept_out", lambda path: next(given))
    found = shut_sockets.shut_finding(Address(path=str(tmp_path / "s")), timeout=0)
    assert (found is not None) == looks[-1]
    if found is not None:
        assert re.search(r"user \d+ may not .*--socket-group", found.message)


class WebPage(socketserver.BaseRequestHandler):
    """Answers whatever it is asked as a web server does that asks for something else."""

    def handle(self) -> None:
        self.request.recv(65536)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        self.request.shutdown(socket.SHUT_WR)
        while self.request.recv(65536):  # or what was not read would take the answer back
            pass


@pytest.fixture
def web_page() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), WebPage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("tls", [None, tl.Tls()], ids=["plain", "TLS"])
def test_a_port_that_something_else_has_is_told_at_once(web_page: str, tls: tl.Tls | None) -> None:
    with pytest.raises(ConfigError, match=r"speaks no gRPC: .*--listen") as caught:
        tl.connect(web_page, tls=tls, timeout=30)
    assert caught.value.facts["reason"] == "NOT_GRPC"
