"""The names of refusals: the docs have each that the code gives, and no other."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE, DESIGN = ROOT / "docs" / "using.md", ROOT / "docs" / "design.md"
HEADINGS = {GUIDE: "| `rule` | what", DESIGN: "| `rule` | decided"}
HAND_OVER = ROOT / "client" / "teacher_logits_client" / "ray"
"""A room whose rules refuse no session: its own page has them."""
NOT_GIVEN = "unknown"
"""What stands in for the names of a refusal that came without any."""


def rows_of(path: Path) -> list[list[list[str]]]:
    """The names in code letters of each cell, row by row, of a page's table of rules."""
    _, _, behind = path.read_text("utf-8").partition(f"\n{HEADINGS[path]}")
    table = behind.partition("\n\n")[0].splitlines()[2:]
    return [[names_in(cell) for cell in line.strip("|").split("|")] for line in table]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def told_by(path: Path) -> list[str]:
    return [name for row in rows_of(path) for name in row[0]]


@cache
def patterns_of_code() -> dict[str, frozenset[str]]:
    """The names that each module gives, as patterns: some are put together there."""
    found: dict[str, frozenset[str]] = {}
    for path in ROOT.glob("*/teacher_logits*/**/*.py"):
        text = path.read_text("utf-8")
        if "Violation(" not in text or HAND_OVER in path.parents:
            continue
        values: list[ast.expr] = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Violation":
                values += [each.value for each in node.keywords if each.arg == "rule"]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "rule":
                values.append(node.value)
        parts = [each.values if isinstance(each, ast.JoinedStr) else [each] for each in values]
        names = {
            "".join(str(p.value) if isinstance(p, ast.Constant) else r"\w+" for p in each)
            for each in parts
            if any(isinstance(p, ast.Constant) for p in each)
        }
        module = path.parent.name if path.stem == "__init__" else path.stem
        found[module] = found.get(module, frozenset()) | (names - {NOT_GIVEN})
    return found


def is_given(name: str, modules: list[str] | None = None) -> bool:
    given = patterns_of_code()
    return any(
        re.fullmatch(pattern, name)
        for module in (given if modules is None else modules)
        for pattern in given.get(module, ())
    )


def test_the_code_is_found_to_give_some() -> None:
    assert patterns_of_code()["seats"] == {"rank_taken", "student_grid_conflict"}
    assert is_given("group_not_node_aligned")
    assert is_given("teacher_dp_indivisible", ["grid"])
    assert not is_given("teacher_dp_indivisible", ["seats"])


@pytest.mark.parametrize("path", HEADINGS, ids=lambda path: path.name)
def test_each_name_that_the_code_gives_is_told_and_no_other(path: Path) -> None:
    told = told_by(path)

    assert [each for each in told if not is_given(each)] == []
    assert sorted(told) == sorted(set(told))
    for patterns in patterns_of_code().values():
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in told), pattern


def test_the_design_says_where_each_is_decided() -> None:
    for names, modules, *_ in rows_of(DESIGN):
        for name in names:
            assert is_given(name, modules), (name, modules)


def test_each_rule_of_a_hand_over_under_ray_is_told_and_no_other() -> None:
    given = set()
    for path in HAND_OVER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Violation", "_violation"):
                named = [each.value for each in node.keywords if each.arg == "rule"] or node.args
                given |= {str(each.value) for each in named if isinstance(each, ast.Constant)}
    page = (ROOT / "docs" / "ray.md").read_text("utf-8")
    lines = page.partition("\n| rule |")[2].partition("\n\n")[0].splitlines()[2:]
    told = [name for line in lines for name in names_in(line.split("|")[1])]

    assert sorted(told) == sorted({*given, "not_positive"})
