"""The server's Ray process, without a cluster: what becomes of its work and of its holders."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from teacher_logits_server.exporters.ray_process import RayProcess


class Holder:
    """One that is told nothing."""

    class keep:
        @staticmethod
        def remote(*given: object) -> object:
            return given


class Channel:
    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, op: str, **message: object) -> bool:
        self.sent.append(op)
        return True


def test_a_holder_that_could_not_be_told_all_takes_nobodys_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, channel = object.__new__(RayProcess), Channel()
    dead: Any = Holder()
    for name, value in {
        "_lock": threading.Lock(),
        "_references": {"o": object()},
        "_revoked": {},
        "_restarts": 0,
        "_holder": dead,
        "_channel": channel,
        "_make_holder": Holder,
        "_name": lambda: "name",
    }.items():
        setattr(process, name, value)
    monkeypatch.setattr(ray, "kill", lambda actor: None)

    def too_late(*given: object, timeout: float) -> None:
        raise GetTimeoutError

    monkeypatch.setattr(ray, "get", too_late)
    with pytest.raises(GetTimeoutError):
        process._replace(dead)
    assert process._holder is dead  # so that the next look tries again
    assert not channel.sent

    monkeypatch.setattr(ray, "get", lambda *given, timeout: None)
    process._replace(dead)
    assert process._holder is not dead
    assert channel.sent == ["holder"]


def test_the_process_ends_with_any_of_its_work() -> None:
    script = (
        "import threading\n"
        "from teacher_logits_server.exporters import ray_process\n"
        "threading.Thread(target=ray_process._or_end, args=(lambda: 1 / 0,)).start()\n"
        "threading.Event().wait(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"ZeroDivisionError" in done.stderr
