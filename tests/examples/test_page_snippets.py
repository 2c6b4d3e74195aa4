"""Every Python snippet of README.md and docs runs as it is shown.

A scene brings the names that a snippet takes as given. A snippet without a scene is an error, so
that none is shown that nobody has run.
"""

from __future__ import annotations

import re
import runpy
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.examples.page_scenes import SCENES, House

import teacher_logits_client as tl
from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parents[2]
SNIPPET = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
ADDRESSES = re.compile(r"unix:/(?:tmp/own|run/teacher-logits)/teacher\.sock")
#: Shown on pages of trainers and GPUs, whose own tests and checks run the like of them.
ELSEWHERE = {
    "from teacher_logits_client.trainers.transformers": (
        "tests/client/trainers/test_transformers_trainer.py"
    ),
    "trainer.train(resume_from_checkpoint": "tests/client/trainers/test_trainer_edges.py",
    "from teacher_logits_client.ray import DeferredTeacher, Side": "tests/ray/test_deferred.py",
    "with tl.connect(address) as client, client.open_publisher(profile, dev": "make gpu-check",
    "storage = torch.empty(1 << 30": "make gpu-check",
    "from teacher_logits_client.data_plane.fields": "tests/ray/test_transfer_queue.py",
    "from opentelemetry import trace": "tests/server/test_tracing.py",
    'with tl.connect("teacher.example:5555"': "tests/processes/test_access.py",
}


@dataclass(frozen=True, kw_only=True)
class Snippet:
    where: str
    line: int
    text: str

    def run(self, names: dict[str, object], address: str) -> dict[str, object]:
        """Run it: at ``address`` for the one it shows, its "..." taken from ``names``."""
        text = ADDRESSES.sub(address, re.sub(r"\.\.\., ", "**given, ", self.text))
        exec(compile("\n" * self.line + text, self.where, "exec"), names)
        return names


def snippets() -> Iterator[Snippet]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for found in SNIPPET.finditer(text):
            line = text[: found.start()].count("\n") + 1
            yield Snippet(where=page.name, line=line, text=textwrap.dedent(found[2]))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    engine = runpy.run_path(str(ROOT / "examples" / "own_engine.py"))["make"](None)
    config = ServerConfig(listen=(f"unix:{folder}/s",))
    others = ServerConfig(listen=(f"unix:{folder}/r",))
    named = ServerConfig(listen=(f"unix:{folder}/n",))
    with (
        serve_in_thread(config, engine) as server,
        serve_in_thread(others, None) as registry,
        serve_in_thread(named, {"math": engine, "code": engine}) as several,
    ):
        addresses = {"address": server.address, "registry": registry.address}
        yield House(**addresses, several=several.address, engine=engine, folder=folder)


def begins(snippet: Snippet, beginnings: Iterable[str]) -> list[str]:
    return [each for each in beginnings if snippet.text.startswith(each)]


def here() -> list[Snippet]:
    return [each for each in snippets() if not begins(each, ELSEWHERE)]


@pytest.mark.parametrize("snippet", here(), ids=lambda each: f"{each.where}:{each.line}")
def test_a_snippet_runs_as_it_is_shown(snippet: Snippet, house: House) -> None:
    scenes = begins(snippet, SCENES)
    assert len(scenes) == 1, f"{snippet.where}:{snippet.line} has {len(scenes)} scenes in SCENES"

    with SCENES[scenes[0]](house) as given:
        given.setdefault("tl", tl)
        snippet.run(given, str(given.get("own_address", house.address)))


def test_no_scene_is_of_a_snippet_that_is_gone() -> None:
    shown = [begin for each in snippets() for begin in begins(each, [*SCENES, *ELSEWHERE])]

    assert sorted({*SCENES, *ELSEWHERE} - set(shown)) == []
