"""Connecting: what a client is told of a socket that it may not connect to."""

import os
import socket
from pathlib import Path

import pytest

import teacher_logits_client as tl
from teacher_logits.errors import ServerUnreachableError
from teacher_logits_client.calls import channels

NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("mode", [0o600, 0o666], ids=["kept out", "let in"])
def test_a_user_whom_a_socket_keeps_out_is_found(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(mode)
        tmp_path.chmod(0o711)
        pid = os.fork()
        if pid == 0:
            answer = 2
            try:
                os.chdir(tmp_path)  # the folders above let nobody else in
                os.setuid(NOBODY)
                answer = int(channels._is_kept_out("s"))
            finally:
                os._exit(answer)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (mode == 0o600)


def test_its_user_is_told_why_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_is_kept_out", lambda path: True)
    with pytest.raises(ServerUnreachableError, match=r"user \d+ may not connect .*--socket-group"):
        tl.connect(f"unix:{tmp_path}/s", timeout=0.05)
