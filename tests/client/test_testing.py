"""The server that users' own tests start."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.client.conftest import a_profile

import teacher_logits_client as tl
from teacher_logits.errors import (
    ConfigError,
    DeadlinePassedError,
    ServerUnreachableError,
    SessionRefusedError,
)
from teacher_logits_client import testing

IDS = torch.arange(40).view(4, 10)

AN_ENGINE = """
import torch
from dataclasses import dataclass

@dataclass(frozen=True)
class Profile:
    name = "mine"
    vocabulary_size = head_rows = 40
    max_row_tokens = 64
    arithmetic_type = "float32"
    revision = tokenizer_fingerprint = ""

class Mine:
    profile = Profile()
    def logits(self, rows):
        for row in rows:
            ids = row.token_ids[row.first : row.first + row.count]
            yield torch.nn.functional.one_hot(ids, 40) * (1.0 + ids.unsqueeze(1))

def make(config):
    return Mine()

def fail(config):
    raise RuntimeError("no weights today")
"""


@pytest.fixture
def in_earnest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are started as users' tests start them, and not forked."""
    monkeypatch.setattr(testing, "subprocess", subprocess)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.usefixtures("in_earnest")
def test_a_server_runs_in_a_process_of_its_own_and_is_gone_afterwards() -> None:
    with testing.serve() as server:
        socket = Path(server.address.removeprefix("unix:"))
        assert server.pid != os.getpid()
        assert repr(server) == f"<ServerProcess {server.pid} at {server.address} (running)>"
        assert socket.is_socket()
        assert "ready" in server.log_text()
        with tl.connect(server.address) as client, client.open_session(a_profile()) as session:
            assert session.transport is tl.Transport.SHARED_MEMORY
            assert session.teacher.engine == "toy"
            refused = {refusal.transport: refusal.reason.value for refusal in session.refusals}
            assert refused == {
                tl.Transport.LOCAL: "OTHER_PROCESS",
                tl.Transport.CUDA_IPC: "NOT_OFFERED",
            }
            with session.score(IDS).result() as payload:
                assert payload.targets.topk_ids.shape == (40, 8)

    assert not is_alive(server.pid)
    assert not socket.parent.exists()


def test_the_toy_teacher_says_the_same_every_time_and_looks_back_but_not_ahead() -> None:
    ids = torch.arange(40)
    first, second = (torch.cat(list(testing.ToyTeacher().logits([a_row(ids)]))) for _ in range(2))
    other = torch.cat(list(testing.ToyTeacher().logits([a_row(ids.roll(20))])))
    changed = ids.clone()
    changed[20] = 99
    later = torch.cat(list(testing.ToyTeacher().logits([a_row(changed)])))

    assert torch.equal(first, second)
    assert not torch.allclose(first, other)
    assert torch.equal(first[:20], later[:20])
    assert (first[20:] != later[20:]).any(1).all()


def test_an_engine_of_ones_own_is_found_in_a_folder_and_settings_are_flags(tmp_path: Path) -> None:
    (tmp_path / "my_engine.py").write_text(AN_ENGINE)
    with (
        testing.serve("my_engine:make", folder=tmp_path, top_k=9, teacher_id="mine") as server,
        tl.connect(server.address) as client,
    ):
        with pytest.raises(SessionRefusedError, match=r"10.*9"):
            client.open_session(a_profile(top_k=10))
        with client.open_session(a_profile(top_k=9)) as session:
            assert session.teacher.teacher_id == "mine"
            with session.score(IDS).result() as payload:
                assert payload.columns["topk_ids"][:, 0].tolist() == list(range(40))


def test_an_engine_that_does_not_load_is_said_with_the_servers_words(tmp_path: Path) -> None:
    (tmp_path / "my_engine.py").write_text(AN_ENGINE)

    with (
        pytest.raises(ServerUnreachableError, match="no weights today"),
        testing.serve("my_engine:fail", folder=tmp_path),
    ):
        pass


def test_a_setting_that_is_none_is_said_with_the_servers_words() -> None:
    with pytest.raises(ConfigError) as caught, testing.serve(no_such_thing=3):
        pass
    reason = caught.value.message.partition(" (the server ended")[0]
    assert reason.count("\n") == 0
    assert "--no-such-thing" in reason


@pytest.mark.parametrize(
    ("engine", "settings", "flags"),
    [
        ("package.module:make", {}, ["--engine", "package.module:make"]),
        ("some/model", {}, ["--model", os.path.abspath("some/model")]),
        (Path("/models/my:model"), {}, ["--model", "/models/my:model"]),
        (None, {"insecure": True, "top_k": 3}, ["--insecure", "--top-k", "3"]),
        (None, {"insecure": False, "listen": ["a", "b"]}, ["--listen", "a", "--listen", "b"]),
    ],
)
def test_engines_and_settings_become_flags(
    engine: str | Path | None, settings: dict[str, object], flags: list[str], tmp_path: Path
) -> None:
    command = testing._command(engine, tmp_path, 7, settings)

    assert " ".join(flags) in " ".join(command)


@pytest.mark.usefixtures("in_earnest")
def test_a_server_that_is_not_ready_in_time_is_killed() -> None:
    before = server_pids()
    with (
        pytest.raises(DeadlinePassedError, match=r"waited 0\.01 s"),
        testing.serve(start_timeout=0.01),
    ):
        pass

    assert server_pids() <= before


def server_pids() -> set[str]:
    """Children of ours that run a server."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # another test's, that ends now
            for pid in (task / "children").read_text().split():
                if b"teacher_logits" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(pid)
    return found


def a_row(ids: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(token_ids=ids, first=0, count=len(ids))
