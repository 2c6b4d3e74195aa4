"""The examples that the README points at run, and teach."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from teacher_logits_client import testing

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_student_learns_from_a_teacher_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    train = runpy.run_path(str(EXAMPLES / "train.py"))["main"]

    with testing.serve("own_engine:make") as server:
        losses = train(server.address)

    assert losses[-1] < losses[0] / 2


def test_the_student_says_how_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])

    with pytest.raises(SystemExit, match=r"usage: python train\.py ADDRESS"):
        runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")


def test_a_student_reads_what_a_teacher_in_a_process_of_its_own_publishes() -> None:
    example = EXAMPLES / "publisher.py"
    learn = runpy.run_path(str(example))["learn"]

    with testing.serve() as server:
        teacher = subprocess.Popen(
            [sys.executable, str(example), "teach", server.address],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            losses = learn(server.address)
            said, _ = teacher.communicate(timeout=30)
        finally:
            teacher.kill()
            teacher.communicate()

    assert teacher.returncode == 0
    assert [line.split(":")[0] for line in said.splitlines()] == ["step 0", "step 1", "step 2"]
    assert all(0 < loss < 20 for loss in losses)
