"""Python that README.md and docs show: it parses, and what it says of `tl` is there."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import reduce
from pathlib import Path

import pytest

import teacher_logits_client as tl

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def faults_of(snippet: str) -> list[str]:
    """Names under `tl` that are not there, and keywords that a call of theirs does not take."""
    faults: list[str] = []
    for node in ast.walk(ast.parse(textwrap.dedent(snippet))):
        target = node.func if isinstance(node, ast.Call) else node
        path = ast.unparse(target) if isinstance(target, ast.Attribute) else ""
        if not re.fullmatch(r"tl(\.\w+)+", path):
            continue
        try:
            found: object = reduce(getattr, path.split(".")[1:], tl)
        except AttributeError:
            faults.append(f"{path} is not there")
            continue
        if isinstance(node, ast.Call) and callable(found):
            taken = inspect.signature(found).parameters
            if all(each.kind is not each.VAR_KEYWORD for each in taken.values()):
                given = {each.arg for each in node.keywords if each.arg}
                faults += [f"{path} takes no {name}=" for name in sorted(given - taken.keys())]
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_of_tl_is_there(page: Path) -> None:
    for _, snippet in SNIPPET.findall(page.read_text(encoding="utf-8")):
        assert faults_of(snippet) == [], snippet


def test_names_and_keywords_that_are_gone_are_seen() -> None:
    assert faults_of("tl.losses.gone(x)\n")[0] == "tl.losses.gone is not there"
    assert faults_of("tl.BatchGrid(sizes=3)\n") == ["tl.BatchGrid takes no sizes="]
