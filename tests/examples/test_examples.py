"""The examples that the README points at run, and teach."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_logits_client import testing

if TYPE_CHECKING:
    import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_student_learns_from_a_teacher_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    train = runpy.run_path(str(EXAMPLES / "train.py"))["main"]

    with testing.serve("own_engine:make") as server:
        losses = train(server.address)

    assert losses[-1] < losses[0] / 2
