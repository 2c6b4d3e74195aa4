"""README.md and docs: links lead somewhere, no page is an orphan, and what is named is there.

Code names a section of a page as `docs/math.md, "Merging"`: that has to be a heading there.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from teacher_logits.__main__ import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#]*)#?([^)]*)\)")
QUOTED = re.compile(r"`([^`\n]+)`")
#: A page and its section, which may stand on two lines, of a comment too.
CITED = re.compile(r"(docs/\w+\.md),[\s#]+\"([^\"]+)\"")
#: What may cite a page, and is no page itself.
CODE = [
    path
    for folder in ("proto", "server", "client", "tests", "benchmarks", "examples", "deploy")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".proto", ".yaml", ".service"}
]
PACKAGES = r"(?:teacher_logits(?:_server|_client)?|tl)"
#: Flags that are other programs': docker's, pip's, systemd's, the checks' of `make`.
FOREIGN = {
    "--alive",
    "--build-arg",
    "--dry-run",
    "--extra-index-url",
    "--from-file",
    "--gpus",
    "--group",
    "--nproc-per-node",
    "--only",
    "--other-python",
    "--pid",
    "--seconds",
    "--shm-size",
    "--write",
    "--wait",
}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    return BLOCK.sub("", text_of(page))


def titles_of(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles_of(page))
    return {title.replace(" ", "-") for title in plain}


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Where a page's links lead: (file, anchor)."""
    found = LINK.findall(prose_of(page))
    return [((page.parent / path).resolve() if path else page, to) for path, to in found]


def faults_of_links(page: Path) -> list[str]:
    missing = [str(path) for path, _ in links_of(page) if not path.exists()]
    anchored = [each for each in links_of(page) if each[1] and each[0].suffix == ".md"]
    return missing + [f"{path}#{to}" for path, to in anchored if to not in anchors_of(path)]


def sections_in(text: str) -> list[tuple[str, str]]:
    """What a text cites: (page, section)."""
    return [(page, re.sub(r"[\s#]+", " ", section)) for page, section in CITED.findall(text)]


def is_section(page: str, section: str) -> bool:
    return (ROOT / page).exists() and section in titles_of(ROOT / page)


def is_there(name: str) -> bool:
    """Whether a dotted name under one of the packages can be had, modules among it."""
    first, *rest = name.split(".")
    found: object = importlib.import_module("teacher_logits_client" if first == "tl" else first)
    for each in rest:
        try:
            found = getattr(found, each)
        except AttributeError:
            try:
                found = importlib.import_module(f"{getattr(found, '__name__', '')}.{each}")
            except ImportError:
                return False
    return True


@each_page
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert faults_of_links(page) == []


def test_every_page_and_example_is_reached_from_the_readme() -> None:
    reached, ahead = {README}, [README]
    while ahead:
        to = {path for path, _ in links_of(ahead.pop())} - reached
        reached |= to
        ahead += [path for path in to if path.suffix == ".md"]

    wanted = {*PAGES, *(ROOT / "examples").glob("*.py")}
    assert sorted(map(str, wanted - reached)) == []


@each_page
def test_names_that_a_page_quotes_are_there(page: Path) -> None:
    quoted = (re.match(rf"{PACKAGES}(\.\w+)+", each) for each in QUOTED.findall(prose_of(page)))
    names = {each[0] for each in quoted if each and not each[0].endswith(".py")}

    assert sorted(name for name in names if not is_there(name)) == []


@each_page
def test_files_that_a_page_quotes_are_there(page: Path) -> None:
    names = {
        each
        for each in QUOTED.findall(prose_of(page))
        if re.fullmatch(r"(tests|examples|deploy|benchmarks|docs)/[\w./]+", each)
    }

    assert sorted(name for name in names if not (ROOT / name).exists()) == []


@each_page
def test_flags_that_a_page_quotes_are_those_of_a_command(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("serve", "demo", "doctor", "inspect", "top"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
    known = {*re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out), *FOREIGN}
    of_commands = re.findall(r"^teacher-logits (?:.*\\\n)*.*$", text_of(page), re.MULTILINE)
    said = (part for each in of_commands for part in each.split("#")[:1])
    everything = "\n".join([*said, *QUOTED.findall(prose_of(page))])
    quoted = re.findall(r"(?<![\w-])--[a-z][a-z-]+", everything)

    assert sorted(set(quoted) - known) == []


def test_sections_that_code_cites_are_headings_of_their_page() -> None:
    cited = {path: sections_in(text_of(path)) for path in CODE if path != Path(__file__)}
    missing = [
        f'{path.relative_to(ROOT)}: {page}, "{section}"'
        for path, sections in cited.items()
        for page, section in sections
        if not is_section(page, section)
    ]

    assert sum(map(len, cited.values())) > 30
    assert missing == []


@pytest.mark.parametrize(
    ("table", "package"),
    [
        ("room of the client", "teacher_logits_client"),
        ("room of the server", "teacher_logits_server"),
        ("room of the contract", "teacher_logits"),
        ("module (server)", "teacher_logits_server"),
    ],
)
def test_modules_that_the_design_names_are_there(table: str, package: str) -> None:
    rows = text_of(ROOT / "docs" / "design.md").split(f"| {table} |")[1].split("\n\n")[0]
    named = [QUOTED.findall(row.split(" | ")[0]) for row in rows.splitlines()[2:]]
    missing = [
        name
        for names in filter(None, named)
        for name in names
        if not is_there(f"{package}.{name}")
        and not is_there(f"{package}.{names[0].split('.')[0]}.{name}")  # "`room.a`, with `b`"
    ]

    assert len(named) > 3
    assert missing == []


def test_figures_of_the_readme_are_those_of_the_page_that_says_how_they_were_measured() -> None:
    table = text_of(README).split("| how fast")[1].split("\n\n")[0]
    figures = set(re.findall(r"\d[\d,.]*\d|\d", table))
    measured = set(re.findall(r"\d[\d,.]*\d|\d", text_of(ROOT / "docs" / "performance.md")))

    assert len(figures) > 12
    assert sorted(figures - measured) == []


def test_what_is_not_there_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[gone](gone.md), [no](#a-title), [no title](#another)\n")

    assert faults_of_links(page) == [f"{tmp_path}/gone.md", f"{page}#another"]
    assert [is_there(f"tl.losses.{name}") for name in ("forward_kl", "gone")] == [True, False]
    assert [is_there(f"teacher_logits.{name}") for name in ("x_token", "gone.x")] == [True, False]
    cited = sections_in(
        '# (docs/math.md, "The\n    # tail"), docs/math.md, "Gone"; docs/no.md, "x"'
    )
    assert cited == [("docs/math.md", "The tail"), ("docs/math.md", "Gone"), ("docs/no.md", "x")]
    assert [is_section(*each) for each in cited] == [True, False, False]
