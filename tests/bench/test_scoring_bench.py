"""The scoring benchmarks run, say what they measured, and hold what was promised of memory."""

from __future__ import annotations

import json

import pytest
from benchmarks import refusal, scoring

FORM = ("figure", "unit", "median", "min", "max", "n")


def figures(text: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(tuple(line)[: len(FORM)] == FORM for line in lines)
    return lines


def test_scoring_says_what_each_way_costs(capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--vocabulary", "500", "--hidden", "32", "--layers", "1", "--k", "8"]
    assert scoring.main([*small, "--tokens", "32", "--rounds", "2", "--threads", "1"]) == 0
    lines = figures(capfd.readouterr().out)
    told = [(line["figure"], line["way"], line["tokens"]) for line in lines]
    assert told == [
        ("scoring_memory", "all_at_once", 32),
        ("scoring_memory", "chunked", 32),
        ("scoring", "all_at_once", 32),
        ("scoring", "chunked", 32),
    ]
    assert {line["anchor"] for line in lines[2:]} == {"all_at_once, 32 tokens"}
    assert [line["n"] for line in lines] == [1, 1, 2, 2]


def test_a_refusal_adds_nothing_to_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    # R07; how quick it is stands in the figure.
    assert refusal.main(["--rounds", "3"]) == 0
    [line] = figures(capsys.readouterr().out)
    assert (line["figure"], line["tokens"], line["n"]) == ("scoring_refusal", 100_000, 3)
    assert isinstance(line["rise_kib"], int)
    assert line["rise_kib"] < 65536  # with what else goes on here; the payload would be 91 GB


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_peak_memory_stands_with_the_chunk_and_not_with_the_row(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # R05 and R06: at most 1.3 times that of 512 tokens, and the chunk's budget within a quarter.
    assert scoring.main(["--ways", "chunked", "--rounds", "4", "--threads", "1"]) == 0
    lines = figures(capfd.readouterr().out)
    [few, many] = [line for line in lines if line["figure"] == "scoring_memory"]
    assert (few["tokens"], many["tokens"]) == (512, 4096)
    assert isinstance(many["ratio"], float)
    assert many["ratio"] <= 1.3
    assert many["median"] == pytest.approx(many["budget_mib"], rel=0.25)
