"""A process that is of no Ray cluster says so, and Ray is not even imported for that.

What is so inside of a cluster stands in `tests/ray/test_ray_object.py`.
"""

from __future__ import annotations

import importlib.util
import sys
import time

import pytest

from teacher_logits.terms import RayHolder
from teacher_logits.transport import Refusal, RefusalReason
from teacher_logits_client.openers.ray_cluster import read_challenge

HOLDER = RayHolder(namespace="n", name="holder", cluster_address="127.0.0.1:6379")


def refused() -> Refusal:
    found = read_challenge(HOLDER, until=time.monotonic() + 5)
    assert isinstance(found, Refusal)
    return found


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests of this process have imported."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_a_process_that_has_not_imported_ray_is_of_no_cluster() -> None:
    refusal = refused()

    assert refusal.reason is RefusalReason.NOT_IN_RAY
    assert "ray.init(address=...)" in refusal.message
    assert "ray" not in sys.modules


def test_a_process_without_ray_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refusal = refused()

    assert refusal.reason is RefusalReason.NO_RAY
    assert "teacher-logits[ray]" in refusal.message
