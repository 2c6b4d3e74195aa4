"""Namespaces with nothing but loopback, and a pytest in them that runs what it is told.

Ray listens on every interface, whatever it is told, and turns 127.0.0.1 into the machine's outer
address. So no test starts it but here. The process namespace ends with its first process, and
takes along what a test or a killed pytest left of Ray.

`Stage` is the parent's end: one child a test file, that collects the file as pytest does, then
runs the items that it is named, one by one, and answers with pytest's own reports. The child's end
is this module as a plugin of that pytest.

    parent  -> {"run": nodeid, "next": nodeid or null}
    child   -> {"report": ...} for each phase, then {"done": nodeid}
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, TextIO

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INSIDE = "TESTS_ALONE"  # the two descriptors of the child's end
# The shell stays, as the first process: it takes in the processes that others leave.
_INTO = (
    *("unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "--"),
    *("sh", "-c", 'ip link set lo up && "$0" "$@"; exit $?'),
)
_SOURCES = ("", "proto", "server", "client")


class ChildEnded(Exception):
    """The child died, or answered nothing for longer than its own time limit allows."""


def why_not() -> str | None:
    """What keeps this process from making such a namespace; None where it can."""
    try:
        tried = subprocess.run([*_INTO, "true"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if tried.returncode == 0 else tried.stderr.strip() or "unshare --net failed"


class Stage:
    """The child that has collected one test file. `close` ends it, and waits for its end."""

    def __init__(self, file: Path, *, root: Path, options: list[str]) -> None:
        to_child, self._orders = os.pipe()
        self._answers, from_child = os.pipe()
        self._said = tempfile.TemporaryFile("w+")
        paths = [str(root / part) for part in _SOURCES]
        environment = {
            **os.environ,
            INSIDE: f"{to_child},{from_child}",
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(":"),
            # Nothing is reported, and nothing killed because others have the machine's memory.
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        for name in [n for n in environment if n.startswith("PYTEST_")]:
            del environment[name]  # of the worker of xdist that starts it
        pytest_there = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.ray.alone",
            *options,
            str(file),
        ]
        self._child = subprocess.Popen(
            [*_INTO, *pytest_there],
            cwd=root,
            env=environment,
            pass_fds=(to_child, from_child),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )
        os.close(to_child)
        os.close(from_child)
        self._left = b""

    def run(self, nodeid: str, *, then: str | None, seconds: float) -> Iterator[dict[str, Any]]:
        """The serialised reports of one item's phases, as they come."""
        order = json.dumps({"run": nodeid, "next": then}) + "\n"
        try:
            os.write(self._orders, order.encode())
        except BrokenPipeError:
            raise ChildEnded(self._last_words()) from None
        while "done" not in (answer := self._answer(seconds)):
            yield answer["report"]

    def _answer(self, seconds: float) -> dict[str, Any]:
        while b"\n" not in self._left:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            more = os.read(self._answers, 1 << 16) if ready else b""
            if not more:
                raise ChildEnded(self._last_words())
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._child.kill()
        self._child.wait()
        self._said.seek(0)
        return f"the pytest of this file ended\n{self._said.read()[-8000:]}"

    def close(self) -> None:
        if self._said.closed:
            return
        os.close(self._orders)
        os.close(self._answers)
        try:
            self._child.wait(60)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._said.close()


class _Answering:
    """The child's end, while its pytest runs: items by name, until the parent closes the pipe."""

    def __init__(self, orders: TextIO, answers: TextIO, config: pytest.Config) -> None:
        self._orders = orders
        self._answers = answers
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for line in self._orders:
            order = json.loads(line)
            item = items[order["run"]]
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=items.get(order["next"]))
            self._say({"done": order["run"]})
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        form = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._say({"report": form})

    def _say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Of the child alone, which loads this module as a plugin."""
    orders, answers = (int(number) for number in os.environ[INSIDE].split(","))
    for end in (orders, answers):
        os.set_inheritable(end, False)  # Ray's processes outlive a pytest that is killed
    config.pluginmanager.register(_Answering(os.fdopen(orders), os.fdopen(answers, "w"), config))
