"""The benchmark of what users complained of elsewhere, R09 and R14, runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from benchmarks import reports
from benchmarks.report import report
from tests.bench.test_scoring_bench import figures

if TYPE_CHECKING:
    import pytest


def test_text_and_sizes_of_k_are_measured(capfd: pytest.CaptureFixture[str]) -> None:
    few = ("--shapes", "64x4", "--sizes-of-k", "1,4", "--bytes", "20000", "--rounds", "2")
    assert reports.main(list(few)) == 0

    lines = figures(capfd.readouterr().out)
    trips = [line for line in lines if line["figure"] == "round_trip"]
    anchors = [line["anchor"] for line in trips if line["form"] == reports.OURS]
    assert anchors == ["shared_memory", *reports.FORMS]
    assert [line["top_k"] for line in lines if line["figure"] == "stream"] == [1, 4]
    assert all(line["ratio"] for line in lines if "anchor" in line)


def test_a_ratio_is_not_rounded_to_none(capsys: pytest.CaptureFixture[str]) -> None:
    """A machine that is busy stops the anchor for as long as it likes."""
    report("round_trip", "ms", [1.0], against=("busy", [30_000.0]))

    (line,) = figures(capsys.readouterr().out)
    assert line["ratio"] == 3.333e-05


def test_each_form_of_text_says_the_same() -> None:
    """What is measured is the whole way, there and back."""
    ids = torch.arange(12, dtype=torch.int32).view(4, 3)
    logprobs = torch.linspace(-4, 0, 12).half().view(4, 3)
    for name, form in reports.FORMS.items():
        found = form(ids, logprobs)
        assert isinstance(found, list), name
        assert torch.equal(found[0], ids), name
        assert torch.equal(found[1], logprobs), name
