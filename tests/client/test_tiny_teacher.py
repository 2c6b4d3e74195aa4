"""The tiny teacher: made on the spot, worth learning from, and there only once."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from teacher_logits.errors import ConfigError
from teacher_logits_client.demo.corpus import topics_text, unigram_perplexity
from teacher_logits_client.demo.tiny_teacher import (
    FIGURES_FILE,
    MAX_ROW_TOKENS,
    VOCABULARY_SIZE,
    make_tiny_teacher,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_teacher(tmp_path_factory.mktemp("cache") / "teacher")


def paragraphs(text: str) -> set[str]:
    return {" ".join(each.split()) for each in text.split("\n\n")}


def test_no_held_out_paragraph_is_in_the_training_text() -> None:
    train, held_out = topics_text()
    assert paragraphs(held_out).isdisjoint(paragraphs(train))
    assert 0.05 < len(held_out) / len(train) < 0.3


def test_the_unigram_model_knows_frequencies_and_nothing_else() -> None:
    # Frequencies 3/5 and 2/5 with one added to each count.
    expected = math.exp(-(math.log(3 / 5) + math.log(2 / 5)) / 2)
    assert unigram_perplexity([0, 0, 1], [0, 1], id_count=2) == pytest.approx(expected)


def test_it_has_learnt_more_than_token_frequencies(teacher: Path) -> None:
    figures = json.loads((teacher / FIGURES_FILE).read_text())
    assert figures["held_out_perplexity"] < 0.5 * figures["unigram_perplexity"]


def test_its_figures_are_those_of_the_model_in_the_folder(teacher: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    train, held_out = (tokenizer(text, verbose=False)["input_ids"] for text in topics_text())
    rows = torch.tensor(held_out[: len(held_out) // 64 * 64]).view(-1, 64)
    with torch.no_grad():
        logprobs = model(rows).logits[:, :-1].log_softmax(-1)
    actual = logprobs.gather(2, rows[:, 1:].unsqueeze(2))
    figures = json.loads((teacher / FIGURES_FILE).read_text())
    assert figures["held_out_perplexity"] == pytest.approx(
        math.exp(-float(actual.mean())), rel=1e-3
    )
    assert figures["unigram_perplexity"] == pytest.approx(
        unigram_perplexity(train, held_out, id_count=VOCABULARY_SIZE)
    )


def test_its_folder_is_that_of_any_model(teacher: Path) -> None:
    names = {path.name for path in teacher.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    assert len(tokenizer) == VOCABULARY_SIZE
    text = "The for statement — näïve 🐍"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    config = AutoModelForCausalLM.from_pretrained(teacher).config
    assert config.max_position_embeddings == MAX_ROW_TOKENS


def test_what_is_there_is_not_made_again(teacher: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in teacher.iterdir()}
    assert make_tiny_teacher(teacher) == teacher
    assert {path: path.stat().st_mtime_ns for path in teacher.iterdir()} == before


def test_another_recipe_takes_its_place_and_the_same_one_gives_the_same_weights(
    tmp_path: Path,
) -> None:
    weights = []
    for seed in (0, 1, 0):
        make_tiny_teacher(tmp_path / "teacher", steps=1, seed=seed)
        weights.append((tmp_path / "teacher" / "model.safetensors").read_bytes())
    assert weights[0] == weights[2]
    assert weights[0] != weights[1]
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds something else"):
        make_tiny_teacher(tmp_path, steps=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
