"""The benchmark of losses from hidden states runs, and ours are exact where clamps are not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from benchmarks import losses
from benchmarks.tail_gradients import MASSES
from tests.bench.test_scoring_bench import figures

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SMALL = ["--vocabulary", "300", "--hidden", "8", "--tokens", "24", "--k", "4", "--rounds", "2"]


def test_losses_and_tails_are_measured(capfd: pytest.CaptureFixture[str]) -> None:
    two = ["--implementations", "ours,dense_autograd", "--tail-positions", "2"]
    assert losses.main([*SMALL, *two]) == 0

    lines = figures(capfd.readouterr().out)
    ours, dense, *tails = lines
    assert [ours["implementation"], dense["implementation"]] == ["ours", "dense_autograd"]
    assert ours["figure"] == dense["figure"] == "hidden_loss"
    assert ours["n"] == dense["n"] == 2
    assert ours["loss"] == dense["loss"]
    assert "extra_mb" in ours
    assert {line["q0"] for line in tails} == set(MASSES)
    assert all(line["figure"] == "tail_gradient_error" for line in tails)
    for line in tails:
        exact = str(line["implementation"]).startswith("ours")
        assert isinstance(line["max"], float)
        assert not exact or line["max"] <= 1e-5


def test_a_peer_that_is_not_there_is_named_and_the_rest_go_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "trl.py").write_text("raise ImportError('no TRL here')")
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(each for each in (str(tmp_path), path) if each)
    )
    two = ["--implementations", "trl_sparse_tail,ours", "--tail-positions", "0"]

    assert losses.main([*SMALL, *two]) == 0

    printed = capfd.readouterr()
    [line] = figures(printed.out)
    assert line["implementation"] == "ours"
    assert "anchor" not in line
    assert "trl_sparse_tail: not measured, no TRL here" in printed.err
