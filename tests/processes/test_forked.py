"""What tests stand on where they fork a program instead of starting an interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forked
from tests.processes.running import PATIENCE_SECONDS, line_of


def run(program: str) -> "subprocess.CompletedProcess[str]":
    return forked.run([sys.executable, "-c", program, "an argument"], timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_a_program_ends_as_it_would(end: str, code: int, said: str) -> None:
    done = run(f"import os, signal, sys\nprint(sys.argv, __name__, flush=True)\n{end}")

    assert done.stdout == "['-c', 'an argument'] __main__\n"
    assert done.returncode == code
    assert done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)


def test_its_threads_are_waited_for_and_its_exit_handlers_run() -> None:
    done = run(
        "import atexit, threading\n"
        "go = threading.Event()\n"
        "atexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (go.wait(), print('thread'))).start()\n"
        "threading.Thread(target=go.set).start()\n"
    )

    assert done.stdout == "thread\nhandler\n"


def test_it_has_the_place_environment_and_descriptors_that_it_was_given_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_A_TEST", "yes")
    program = (
        "import os, sys\n"
        "print(os.getcwd(), os.environ['OF_A_TEST'], flush=True)\n"
        "print({fd for fd in range(512) if os.path.exists(f'/proc/self/fd/{fd}')}, flush=True)\n"
        "os.write(int(sys.argv[1]), b'here')\n"
    )
    reading, writing = os.pipe()
    with (
        open(reading, "rb") as pipe,
        open(writing, "wb") as theirs,
        forked.Popen(
            [sys.executable, "-c", program, str(writing)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(writing,),
        ) as process,
    ):
        theirs.close()
        assert line_of(process) == f"{tmp_path} yes"
        assert line_of(process) == str({0, 1, 2, writing})
        assert pipe.read() == b"here"


def test_it_is_waited_for_and_told_to_end() -> None:
    with forked.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert line_of(process) == "up"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGTERM
        assert process.poll() == -signal.SIGTERM
