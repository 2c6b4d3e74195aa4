"""The benchmark of the Ray transfer runs, alone with loopback."""

from __future__ import annotations

import os

import pytest
from benchmarks import ray_transfer
from tests.bench.test_scoring_bench import figures
from tests.ray.alone import why_not


@pytest.fixture
def namespace() -> None:
    """Skipped in sight where no network namespace can be made; in CI the benchmark says why."""
    if (why := why_not()) is not None and not os.environ.get("CI"):
        pytest.skip(f"no network namespace for Ray: {why}")


@pytest.mark.timeout(300)  # Ray is started, and four workers import torch
@pytest.mark.usefixtures("namespace")
def test_every_path_is_measured_beside_the_base(capfd: pytest.CaptureFixture[str]) -> None:
    few = ["--size-bytes", "300000", "--rounds", "1", "--ranks", "1", "--settle-seconds", "0"]
    assert ray_transfer.main(few) == 0

    lines = figures(capfd.readouterr().out)
    assert [line["path"] for line in lines] == ["base", "deferred", "views", "slabs", "calls"]
    assert all(line["anchor"] == "base" and line["ratio"] for line in lines[:4])
    assert all(line["size_bytes"] == 299_520 and line["spilled"] is False for line in lines)
