"""The benchmarks of what a teacher is worth run, and say what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import trainer_wait
from benchmarks.distilling import prefix

from teacher_logits_client import Targets, select_top_k

ROOT = Path(__file__).parents[2]
FORM = ("figure", "unit", "median", "min", "max", "n")


def figures(text: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(tuple(line)[: len(FORM)] == FORM for line in lines)
    return lines


def test_a_smaller_k_is_what_the_teacher_would_have_said() -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))

    def targets_of(k: int) -> Targets:
        kept = select_top_k(logits, k=k)
        return Targets(
            topk_ids=kept.topk_ids,
            topk_logprobs=kept.topk_logprobs.float(),
            log_tail=kept.log_tail[:, 0],
            actual_logprob=None,
            valid=torch.ones(4, dtype=torch.bool),
            temperature=1.0,
            row_offsets=torch.tensor([0, 4]),
        )

    few, wanted = prefix(targets_of(16), 4), targets_of(4)

    assert torch.equal(few.topk_ids, wanted.topk_ids)
    torch.testing.assert_close(few.log_tail, wanted.log_tail)


@pytest.mark.slow
def test_a_student_is_measured_with_each_recipe_at_each_seed(tmp_path: Path) -> None:
    """In a process of its own: it forks, and in this one other tests have left threads."""
    plot = tmp_path / "plot.svg"
    flags = ["--steps", "3", "--seeds", "2", "--held-out-rows", "4", "--plot", str(plot)]

    told_all = subprocess.run(
        [sys.executable, "-m", "benchmarks.distillation", "--tiny", *flags],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout

    lines = figures(told_all)
    held_out = [line for line in lines if line["figure"] == "held_out"]
    told = {(line["recipe"], line["k"], line["seed"], line["unit"]) for line in held_out}
    assert len(told) == len(held_out) == 6 * 2 * (2 + 1)
    assert plot.read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_trainers_waits_are_measured_ahead_and_not(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--steps", "2", "--rounds", "1", "--layers", "1", "--tokens", "8"]

    assert trainer_wait.main(flags) == 0

    lines = figures(capsys.readouterr().out)
    waits = [line for line in lines if line["figure"] == "trainer_wait"]
    assert [line["prefetch"] for line in waits] == [0, 1, 2]
