"""The examples of trainers that people already use run, and teach (report R23)."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from teacher_logits_server.app import serve_in_thread
from teacher_logits_server.config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The teacher of the example beside them."""
    make = runpy.run_path(str(EXAMPLES / "own_engine.py"))["make"]
    folder = tmp_path_factory.mktemp("server")
    config = ServerConfig(listen=(f"unix:{folder}/s",))
    with serve_in_thread(config, make(config)) as server:
        yield server.address


def main_of(name: str) -> Callable[[str], list[float]]:
    found: Callable[[str], list[float]] = runpy.run_path(str(EXAMPLES / name))["main"]
    return found


def test_a_trainer_of_transformers_learns(teacher: str) -> None:
    before, after = main_of("hf_trainer.py")(teacher)

    assert after < 0.8 * before


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_trainer_of_trl_learns(teacher: str) -> None:
    pytest.importorskip("trl")

    losses = main_of("trl_trainer.py")(teacher)

    assert losses[-1] < 0.8 * losses[0]


def test_batches_of_nemo_rl_and_verl_are_filled_and_read(teacher: str) -> None:
    found = main_of("rl_batches.py")(teacher)

    assert all(math.isfinite(loss) and loss > 0 for loss in found)
