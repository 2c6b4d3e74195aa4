"""Connections of lines: a broker that is busy is waited for."""

import socket
import threading
from pathlib import Path

import pytest

from teacher_logits_client.line.packets import Connection, connect

SECONDS = 20.0
MOMENT = 0.1


def full(listener: socket.socket, path: str) -> list[socket.socket]:
    """Connect until the listener's queue takes no more."""
    waiting = []
    while True:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        waiting.append(one)
        one.setblocking(False)
        try:
            one.connect(path)
        except BlockingIOError:
            return waiting


def test_a_connection_waits_until_a_full_queue_has_room(tmp_path: Path) -> None:
    path, made = str(tmp_path / "s"), list[Connection]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        others = full(listener, path)
        thread = threading.Thread(target=lambda: made.append(connect(path, SECONDS)))
        thread.start()
        thread.join(MOMENT)  # one that does not wait has ended by now
        others.append(listener.accept()[0])
        thread.join(SECONDS)
        assert [each.getblocking() for each in made] == [False]
    for each in (*others, *made):
        each.close()


def test_it_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(0)
        others = full(listener, path)
        for seconds in (MOMENT, 0.0):
            with pytest.raises(BlockingIOError):
                connect(path, seconds)
    for each in others:
        each.close()
