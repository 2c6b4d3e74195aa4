"""The command `teacher-logits`: it knows no side, finds what is installed, and exits in order."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from teacher_logits import __main__ as command
from teacher_logits import __version__
from teacher_logits.errors import ConfigError, PoolFullError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Point:
    """An entry point, as the installed metadata has them."""

    name: str
    run: Callable[[list[str]], int]

    def load(self) -> Callable[[list[str]], int]:
        return self.run


class Commands:
    """Two commands that note how they were called."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.raises: BaseException | None = None
        self.exits = 0

    def run(self, argv: list[str]) -> int:
        self.calls.append(argv)
        if self.raises is not None:
            raise self.raises
        return self.exits


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands()

    def entry_points(*, group: str) -> list[Point]:
        assert group == "teacher_logits.commands"
        return [Point("serve", commands.run), Point("doctor", commands.run)]

    monkeypatch.setattr(command, "entry_points", entry_points)
    return commands


def test_a_command_gets_what_stands_behind_its_name(commands: Commands) -> None:
    assert command.main(["serve", "--model", "x"]) == 0

    assert commands.calls == [["--model", "x"]]


def test_a_commands_exit_code_is_ours(commands: Commands) -> None:
    commands.exits = 7

    assert command.main(["serve"]) == 7


def test_help_lists_the_commands_there_are(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--help"]) == 0

    written = capsys.readouterr().out
    assert "  doctor    find what stands in the way" in written
    assert "  serve     run a teacher" in written
    assert commands.calls == []


def test_no_command_is_called_wrongly(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([]) == 2

    assert "usage" in capsys.readouterr().out


def test_an_unknown_command_is_named_with_those_there_are(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["sevre"]) == 2

    written = capsys.readouterr().err
    assert "'sevre'" in written
    assert "serve" in written


def test_the_version_is_the_packages(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--version"]) == 0

    assert capsys.readouterr().out == f"teacher-logits {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("--port 0: no"), 2), (PoolFullError("full"), 1)]
)
def test_an_error_of_ours_is_a_sentence_and_no_traceback(
    commands: Commands,
    capsys: pytest.CaptureFixture[str],
    error: ConfigError | PoolFullError,
    code: int,
) -> None:
    commands.raises = error

    assert command.main(["serve"]) == code

    assert capsys.readouterr().err == f"teacher-logits serve: {error.message}\n"


def test_any_other_error_is_not_hidden(commands: Commands) -> None:
    commands.raises = ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        command.main(["serve"])


def test_an_interrupt_ends_it_as_shells_expect(commands: Commands) -> None:
    commands.raises = KeyboardInterrupt()

    assert command.main(["serve"]) == 130


def test_it_runs_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "teacher_logits", "--version"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert run.stdout == f"teacher-logits {__version__}\n"


def test_it_loads_neither_side_nor_torch_before_a_command_is_named() -> None:
    script = (
        "import sys; from teacher_logits.__main__ import main; main(['--help']); "
        "print(*(n for n in ('torch', 'grpc', 'teacher_logits_server', 'teacher_logits_client') "
        "if n in sys.modules), 'end')"
    )

    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )

    assert run.stdout.splitlines()[-1] == "end"
