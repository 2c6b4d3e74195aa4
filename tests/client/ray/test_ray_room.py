"""The room stands alone: without our server, without gRPC, and its rules without torch or Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import sys

class Barred:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BARRED:
            raise ImportError(f"{name} is barred")

BARRED = %r
sys.meta_path.insert(0, Barred())
from teacher_logits_client import ray
%s
"""


@pytest.mark.parametrize(
    ("barred", "lines"),
    [
        (
            {"grpc", "google", "teacher_logits_server"},
            "assert [getattr(ray, name) for name in ray.__all__]",
        ),
        (
            {"grpc", "google", "teacher_logits_server", "torch", "numpy", "ray"},
            "side = ray.Side(data_parallel_size=1, global_batch_size=2)\n"
            "plan = ray.StepPlan(row_count=2, student=side, teacher=side)\n"
            "assert ray.agree(plan).path is ray.Path.DEFERRED",
        ),
    ],
    ids=["all of it", "the rules"],
)
def test_it_is_imported_without(barred: set[str], lines: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT % (barred, lines)], capture_output=True, text=True
    )

    assert ran.returncode == 0, ran.stderr


def test_every_name_that_it_promises_is_there() -> None:
    from teacher_logits_client import ray as room

    assert set(room.__all__) <= set(dir(room))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        room.nothing  # type: ignore[attr-defined]  # noqa: B018
