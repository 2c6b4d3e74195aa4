"""The benchmark of losses from hidden states runs, and ours are exact where clamps are not."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout

import pytest
from benchmarks import losses
from benchmarks.tail_gradients import MASSES
from tests.bench.test_scoring_bench import figures

SMALL = ["--vocabulary", "300", "--hidden", "8", "--tokens", "24", "--k", "4", "--rounds", "2"]
SOME = ["--implementations", "trl_sparse_tail,ours,dense_autograd", "--tail-positions", "2"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What a run without TRL printed: figures, and on standard error what was missing."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "trl.py").write_text("raise ImportError('no TRL here')")
    path = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{path}" if path else str(folder))
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            assert losses.main([*SMALL, *SOME]) == 0
    return out.getvalue(), err.getvalue()


def test_what_a_loss_costs_is_measured(printed: tuple[str, str]) -> None:
    ours, dense = (line for line in figures(printed[0]) if line["figure"] == "hidden_loss")

    assert [ours["implementation"], dense["implementation"]] == ["ours", "dense_autograd"]
    assert ours["anchor"] == "dense_autograd"
    assert ours["n"] == dense["n"] == 2
    assert ours["loss"] == dense["loss"]
    assert isinstance(ours["extra_mb"], float)


def test_a_peer_that_is_not_there_is_named(printed: tuple[str, str]) -> None:
    assert "trl_sparse_tail: not measured, no TRL here" in printed[1]


def test_ours_are_exact_at_every_tail(printed: tuple[str, str]) -> None:
    tails = [line for line in figures(printed[0]) if line["figure"] == "tail_gradient_error"]
    ours = [line for line in tails if str(line["implementation"]).startswith("ours")]

    assert {line["q0"] for line in ours} == set(MASSES)
    for line in ours:
        assert isinstance(line["max"], float)
        assert line["max"] <= 1e-5


def test_a_clamp_is_not(printed: tuple[str, str]) -> None:
    tails = [line for line in figures(printed[0]) if line["figure"] == "tail_gradient_error"]
    [clamped] = (
        line
        for line in tails
        if (line["implementation"], line["q0"]) == ("remainder_clamped", min(MASSES))
    )

    assert isinstance(clamped["min"], float)
    assert clamped["min"] > 1e-3
