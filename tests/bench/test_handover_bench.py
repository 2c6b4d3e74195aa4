"""The benchmark of the hand-over runs, and says what it measured in the form that all share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import handover
from tests.bench.test_scoring_bench import figures

if TYPE_CHECKING:
    import pytest

BESIDE_THE_ANCHOR = {"close", "handover", "seal_to_reader"}
OF_A_STEP = BESIDE_THE_ANCHOR | {"read_pages", "write_pages"}


def test_a_hand_over_is_measured_beside_a_bare_grpc_call(capfd: pytest.CaptureFixture[str]) -> None:
    assert handover.main(["--size-bytes", "100000,400000", "--rounds", "1"]) == 0

    lines = figures(capfd.readouterr().out)
    anchors = lines[:4]
    assert [(line["figure"], line.get("way")) for line in anchors] == [
        ("grpc_unary", "in_a_row"),
        ("grpc_unary", "alone"),
        ("grpc_unary_idle", None),
        ("bare_wake", None),
    ]
    steps = [line for line in lines if line not in anchors]
    assert {line["transport"] for line in steps} == {"shared_memory"}
    for size_bytes in {line["size_bytes"] for line in steps}:
        assert {line["figure"] for line in steps if line["size_bytes"] == size_bytes} == OF_A_STEP
    assert {line["figure"] for line in steps if "ratio" in line} == BESIDE_THE_ANCHOR
    assert {line["figure"] for line in steps if "idle_ratio" in line} == {"seal_to_reader"}
    assert {line["after"] for line in steps if line["figure"] == "handover"} == {"close", "return"}
