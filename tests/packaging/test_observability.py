"""deploy/grafana and deploy/prometheus: their checker finds nothing in them, and what is broken."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("promql_parser")  # of the group `dev`

from deploy.observability_check import (
    ALERTS,
    DASHBOARD,
    FOLDER,
    check_observability,
    check_query,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of both files, to be broken."""
    for each in (DASHBOARD, ALERTS):
        (tmp_path / each).parent.mkdir()
        shutil.copy(FOLDER / each, tmp_path / each)
    return tmp_path


def test_nothing_is_wrong_with_those_that_ship() -> None:
    assert check_observability() == []


@pytest.mark.parametrize(
    ("query", "finding"),
    [
        ("teacher_logits_session", "there is no metric teacher_logits_session"),
        ("rate(teacher_logits_rpc_seconds[5m])", "there is no metric teacher_logits_rpc_seconds"),
        ('teacher_logits_leases{session="s"}', "teacher_logits_leases has no label session"),
        ("sum(teacher_logits_leases", "is no PromQL"),
    ],
)
def test_a_query_that_names_what_is_not_there_is_found(query: str, finding: str) -> None:
    (found,) = check_query(query)
    assert finding in found


def test_macros_of_grafana_are_understood() -> None:
    query = 'rate(teacher_logits_rpc_seconds_bucket{job=~"$job", le="1"}[$__rate_interval])'
    assert check_query(query) == []


def test_a_dashboard_that_is_broken_is_found(folder: Path) -> None:
    board = json.loads((folder / DASHBOARD).read_text())
    board["panels"][2]["id"] = board["panels"][1]["id"]
    board["panels"][3]["gridPos"] = board["panels"][1]["gridPos"]
    board["panels"][1]["targets"][0]["expr"] = "teacher_logits_gone"
    board["templating"]["list"] = board["templating"]["list"][1:]
    (folder / DASHBOARD).write_text(json.dumps(board))

    found = "\n".join(check_observability(folder))
    for part in ("2 panels have id", "stands on", "no metric teacher_logits_gone", "data source"):
        assert part in found


def test_files_that_do_not_parse_or_lack_something_are_found(folder: Path) -> None:
    (folder / DASHBOARD).write_text("{")
    text = (folder / ALERTS).read_text().replace("severity: critical", "severity: urgent", 1)
    (folder / ALERTS).write_text(text.replace("TeacherLogitsFailing", "TeacherLogitsDown"))

    found = "\n".join(check_observability(folder))
    for part in (str(DASHBOARD), "has no severity", "2 alerts are called TeacherLogitsDown"):
        assert part in found
