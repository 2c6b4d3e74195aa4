"""Every surface under inputs that nobody meant: the corpus again, and mutations of good ones.

`make fuzz SURFACE=... RUNS=...` tries as many as are wanted; docs/reliability.md has the figures.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.fuzz.corpus import FOLDER, corpus_of
from tests.fuzz.house import House
from tests.fuzz.mutation import mutated
from tests.fuzz.running import running
from tests.fuzz.surface import joined, split
from tests.fuzz.surfaces import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
EXAMPLES, INPUTS = 10, 20
"""Hypothesis draws seeds of the mutations, each for some inputs: 200 inputs a surface."""
_SLOW = {"jagged"}  # what it imports takes seconds


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) if each in _SLOW else each for each in NAMES],
)
def test_no_input_is_answered_by_more_than_an_error_of_the_tree(name: str, house: House) -> None:
    with running(name, lambda: house) as run:
        seeds = [*run.surface.seeds(), *corpus_of(name)]
        for each in corpus_of(name):
            run.one(each)

        @settings(
            max_examples=EXAMPLES,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(seed=st.integers(0, 1 << 32))
        def tried(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(INPUTS):
                run.one(mutated(dice, seeds))

        tried()
        run.check()
        run.check_growth()


def test_the_corpus_is_of_surfaces_that_there_are() -> None:
    assert {each.name for each in FOLDER.iterdir()} <= set(NAMES)


@given(parts=st.lists(st.binary(max_size=40), max_size=5))
def test_the_messages_of_an_input_are_cut_where_they_were_joined(parts: list[bytes]) -> None:
    assert split(joined(parts)) == parts


def test_a_growth_of_descriptors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle itself bites: here the surface keeps what it opens."""
    monkeypatch.setattr("tests.fuzz.running.SLOWEST_SECONDS", 0.2)  # how long it is waited for
    kept: list[TextIO] = []

    def keep(data: bytes) -> str:
        kept.append(open("/dev/null", encoding="utf-8"))
        return "KEPT"

    with running("replies", House) as run:
        monkeypatch.setattr(run.surface, "run", keep)
        for _ in range(40):
            run.one(b"")
        with pytest.raises(AssertionError):
            run.check_growth()
    for each in kept:
        each.close()


@pytest.mark.parametrize(
    ("said", "is_brought"),
    [("", True), ("--seed 2", True), ("--engine own --seed 2", False), ("--engine=own", False)],
)
def test_make_brings_atheris_unless_it_is_not_asked_for(
    said: str, is_brought: bool, tmp_path: Path
) -> None:
    (tmp_path / ".ready").touch()
    command = ["make", "--dry-run", f"VENV={tmp_path}", "fuzz", f"ARGS={said}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert ("--group fuzz" in done.stdout) == is_brought
    assert f"-m tests.fuzz rpc --runs 10000 {said}".rstrip() in done.stdout
