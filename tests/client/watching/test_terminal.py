"""`teacher-logits top` at a terminal, over a pipe, and with a server that comes and goes."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError, ServerUnreachableError
from teacher_logits_client import cli, testing
from teacher_logits_client.calls.inspection import inspect_server
from teacher_logits_client.watching import command
from teacher_logits_client.watching.rates import (
    GRANTED_BYTES,
    LABELS,
    PASS_FILLS,
    PASSES,
    QUEUE_REQUESTS,
    SCORED_TOKENS,
    Looks,
)
from teacher_logits_server.metrics.names import METRICS

ENOUGH_SECONDS = 60
TOP = (sys.executable, "-m", "teacher_logits", "top")
LEAVES_SCREEN = "\x1b[?1049l"


class Terminal:
    """A command at a terminal of its own: what it wrote, and a keyboard."""

    def __init__(self, *argv: str, term: str = "xterm", size: tuple[int, int] = (24, 80)) -> None:
        self._master, slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.process = subprocess.Popen(
            [*TOP, *argv, "--interval", "0.1"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": term, "COLUMNS": "", "LINES": ""},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.written = ""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, words: str) -> str:
        """Read until words are written; return all that was since the last time."""
        until = time.monotonic() + ENOUGH_SECONDS
        while words not in self.written:
            self._read(until)
        seen, self.written = self.written, ""
        return seen

    def ends(self) -> tuple[int, str]:
        """Its exit code, and what it wrote until then."""
        until = time.monotonic() + ENOUGH_SECONDS
        while self.process.poll() is None:
            self._read(until, most=0.05)
        while select.select([self._master], [], [], 0)[0]:
            self._read(until)
        return self.process.returncode, self.written

    def _read(self, until: float, *, most: float = ENOUGH_SECONDS) -> None:
        left = until - time.monotonic()
        assert left > 0, self.written[-2000:]
        if select.select([self._master], [], [], min(left, most))[0]:
            self.written += os.read(self._master, 65536).decode("utf-8", "replace")


@contextmanager
def at_a_terminal(*argv: str, term: str = "xterm") -> Iterator[Terminal]:
    terminal = Terminal(*argv, term=term)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture(scope="module")
def server() -> Iterator[testing.ServerProcess]:
    with testing.serve(pool_size="16MiB") as process:
        yield process


@contextmanager
def a_student(address: str, name: str) -> Iterator[None]:
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1)
    profile = tl.StudentProfile(batch_grid=grid, top_k=8, student_id=name)
    with tl.connect(address) as client, client.open_session(profile):
        yield


def test_keys_sort_pause_and_quit_and_the_terminal_is_as_it_was(
    server: testing.ServerProcess,
) -> None:
    with a_student(server.address, "ada"), at_a_terminal(server.address) as terminal:
        terminal.wait_for("ada")
        terminal.type("s")
        terminal.wait_for("sort by: seen")
        terminal.type("p")
        terminal.wait_for("PAUSED")
        terminal.type("p")
        terminal.wait_for("p pause")
        assert "PID" in terminal.wait_for("TRANSPORT")
        terminal.resize(24, 40)
        terminal.wait_for("LEASED")  # of a frame that may be as wide as before
        while "PID" in terminal.wait_for("p pause"):
            pass
        terminal.type("q")

        code, written = terminal.ends()
        assert code == 0
        assert LEAVES_SCREEN in written
        assert termios.tcgetattr(terminal._slave) == terminal.before


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_its_code_and_leaves_the_terminal_as_it_was(
    server: testing.ServerProcess, number: int, code: int
) -> None:
    with at_a_terminal(server.address) as terminal:
        terminal.wait_for("no sessions")
        terminal.process.send_signal(number)

        found, written = terminal.ends()
        assert found == code
        assert LEAVES_SCREEN in written
        assert "Traceback" not in written
        assert termios.tcgetattr(terminal._slave) == terminal.before


@pytest.mark.slow
def test_a_server_that_ends_and_comes_back_is_shown_as_such(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    with at_a_terminal(address) as terminal:
        terminal.wait_for("nothing was seen yet")
        with testing.serve(listen=[address], pool_size="16MiB"):
            terminal.wait_for("serving")
        terminal.wait_for("asking again; what it showed last is below")
        with testing.serve(listen=[address], pool_size="16MiB"), a_student(address, "ada"):
            terminal.wait_for("restarted 1x")
            terminal.wait_for("ada")
        terminal.type("q")
        assert terminal.ends()[0] == 0


@pytest.mark.slow
def test_a_dumb_terminal_gets_frame_after_frame_and_nothing_to_obey(
    server: testing.ServerProcess,
) -> None:
    with at_a_terminal(server.address, term="dumb") as terminal:
        terminal.wait_for("no sessions")
        assert "\x1b" not in terminal.wait_for("no sessions")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ends()[0] == 130


def test_once_writes_one_frame_with_rates_and_nothing_to_obey(
    server: testing.ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with a_student(server.address, "ada"):
        assert cli.top([server.address, "--once", "--interval", "0.1"]) == 0

    written = capsys.readouterr().out
    assert written.count("teacher-logits, serving") == 1
    assert "ada" in written
    assert "\x1b" not in written


def test_a_server_counts_what_is_drawn(server: testing.ServerProcess) -> None:
    looks = Looks()
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=1)
    profile = tl.StudentProfile(batch_grid=grid, top_k=8)
    with tl.connect(server.address) as client, client.open_session(profile) as session:
        looks.add(inspect_server(client.address, timeout=ENOUGH_SECONDS))
        with session.score([[1, 2, 3], [4, 5]]).result(timeout=ENOUGH_SECONDS) as payload:
            size = payload.payload.size_bytes
        looks.add(inspect_server(client.address, timeout=ENOUGH_SECONDS))
    rates = looks.rates()

    assert rates.changes[SCORED_TOKENS]["teacher"] == 5
    assert rates.changes[GRANTED_BYTES]["shared_memory"] >= size
    assert rates.changes[PASSES]["teacher"] >= 1
    assert 0 < (rates.share(PASS_FILLS, PASSES, "teacher") or 0) <= 1


def test_every_number_that_is_drawn_is_one_that_servers_show() -> None:
    shown = {each.name for each in METRICS if each.kind != "histogram"}
    shown |= {
        f"{each.name}_{end}"
        for each in METRICS
        if each.kind == "histogram"
        for end in ("sum", "count")
    }
    assert {*LABELS, QUEUE_REQUESTS} <= shown


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(server: testing.ServerProcess) -> None:
    with subprocess.Popen(
        [*TOP, server.address, "--interval", "0.1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("teacher-logits, serving")
        process.stdout.close()
        assert process.wait(ENOUGH_SECONDS) == 0
        assert process.stderr.read() == ""


def test_once_of_a_server_that_is_not_there_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachableError):
        cli.top([f"unix:{tmp_path / 'nobody'}", "--once", "--timeout", "1"])


@pytest.mark.parametrize("interval", ["0", "nan", "-1", "1e9"])
def test_an_interval_must_be_one(interval: str) -> None:
    with pytest.raises(ConfigError, match="--interval"):
        cli.top(["unix:/s", "--interval", interval])


def test_without_rich_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"teacher-logits\[top\]"):
        cli.top(["unix:/s"])
