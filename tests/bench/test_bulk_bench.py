"""The benchmarks of bulk run, and say what they measured in the form that all share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import control, stream
from tests.bench.test_scoring_bench import figures

if TYPE_CHECKING:
    import pytest

SMALL = ("--rows", "1", "--tokens", "64", "--rounds", "1")
ANCHORS = ["grpc_1mib", "grpc_2mib", "flight", "raw_socket"]


def test_a_stream_is_measured_beside_every_anchor(capfd: pytest.CaptureFixture[str]) -> None:
    assert stream.main([*SMALL, "--nets", "tcp"]) == 0

    lines = figures(capfd.readouterr().out)
    assert [line["name"] for line in lines if line["figure"] == "anchor"] == ANCHORS
    ours = [line for line in lines if line["figure"] == "stream"]
    assert [line["anchor"] for line in ours] == ANCHORS
    assert all(line["ratio"] for line in ours)
    assert {(line["net"], line["size_bytes"], line["unit"]) for line in lines} == {
        ("tcp", ours[0]["size_bytes"], "GB/s")
    }


def test_control_calls_are_measured_alone_and_under_streams(
    capfd: pytest.CaptureFixture[str],
) -> None:
    few = ("--streams", "1", "--watchers", "3", "--calls", "20", "--sessions", "2")
    assert control.main([*SMALL, *few, "--idle-seconds", "0.05"]) == 0

    lines = figures(capfd.readouterr().out)
    assert [(line["figure"], line.get("streams"), line.get("watchers")) for line in lines[:8]] == [
        ("control_p50", 0, 0),
        ("control_p50", 1, 0),
        ("control_p50", 1, 3),
        ("control_p99", 0, 0),
        ("control_p99", 1, 0),
        ("control_p99", 1, 3),
        ("bulk", 1, 0),
        ("bulk", 1, 3),
    ]
    assert [line["liveness"] for line in lines[8:]] == ["line", "ttl"]
