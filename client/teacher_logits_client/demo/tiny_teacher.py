"""A teacher that downloads nothing: a small language model, made on the spot and kept.

A byte-level BPE tokenizer and a Llama of one layer learn the training text of ``corpus`` for a
few seconds on one core; the result is a folder like that of any model: ``config.json``,
safetensors, ``tokenizer.json``. It has learnt enough to be worth learning from: on held-out
text its perplexity is less than half that of the token frequencies. ``figures.json`` beside
the weights has both.

Promises: the same folder for the same arguments on one machine, whole or not at all; made once,
however many ask for it. Needs ``teacher-logits[demo]``, and says so (``ConfigError``).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import cross_entropy

from teacher_logits.errors import ConfigError
from teacher_logits_client.demo.corpus import topics_text, unigram_perplexity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY_SIZE = 1024
MAX_ROW_TOKENS = 512
STEPS = 150
FIGURES_FILE = "figures.json"

# Raise it when something below changes: the teachers that are there are then made anew.
_EDITION = 1
_END = "<|end|>"
_ROWS, _ROW_TOKENS = 8, 64
_LEARNING_RATE = 0.02


def make_tiny_teacher(folder: str | Path, *, steps: int = STEPS, seed: int = 0) -> Path:
    """Return ``folder``, with a tiny teacher in it: made now, unless this one is there already.

    Takes about 5 s of one core the first time. ``steps`` of training, 512 tokens each. A tiny
    teacher of other steps or another seed makes way.

    Raises:
        ConfigError: ``transformers`` or ``tokenizers`` are not installed, or the folder holds
            something else.
    """
    place = Path(folder)
    recipe = {"edition": _EDITION, "steps": steps, "seed": seed}
    if _recipe_of(place) == recipe:
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        figures = _make(draft / "new", steps=steps, seed=seed)
        (draft / "new" / FIGURES_FILE).write_text(json.dumps({**recipe, **figures}))
        if _recipe_of(place) not in (None, recipe):
            os.rename(place, draft / "old")
        try:
            os.rename(draft / "new", place)
        except OSError as error:
            if _recipe_of(place) != recipe:  # else another process was quicker: as good
                raise ConfigError(
                    f"the tiny teacher cannot be put into {str(place)!r}, which holds something "
                    f"else ({error.strerror}): give an empty folder, or one that is not there",
                    facts={"folder": str(place)},
                ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def _recipe_of(folder: Path) -> dict[str, int] | None:
    """Return what the tiny teacher in a folder was made of; None where there is none."""
    try:
        said = json.loads((folder / FIGURES_FILE).read_bytes())
        return {name: int(said[name]) for name in ("edition", "steps", "seed")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _make(folder: Path, *, steps: int, seed: int) -> dict[str, float]:
    tokenizer = _train_tokenizer()
    train, held_out = (
        cast("list[int]", tokenizer(text, verbose=False)["input_ids"]) for text in topics_text()
    )
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(tokenizer)
        _train(model, torch.tensor(train), steps=steps)
        figures = {
            "held_out_perplexity": _perplexity(model, torch.tensor(held_out)),
            "unigram_perplexity": unigram_perplexity(train, held_out, id_count=VOCABULARY_SIZE),
        }
    with _no_progress_bar():
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return figures


def _train_tokenizer() -> PreTrainedTokenizerFast:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            f"the tiny teacher needs a package that is not here ({error}): install "
            "teacher-logits[demo]"
        ) from error
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[_END],
        show_progress=False,
    )
    bare.train_from_iterator([topics_text()[0]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=_END, pad_token=_END)


def _new_model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=MAX_ROW_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return cast("PreTrainedModel", LlamaForCausalLM(config))


def _train(model: PreTrainedModel, ids: torch.Tensor, *, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95))
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _LEARNING_RATE, total_steps=max(steps, 2), pct_start=0.1
    )
    places = torch.arange(_ROW_TOKENS)
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - _ROW_TOKENS, (_ROWS, 1))
        loss = _loss(model, ids[starts + places])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    model.eval()


def _perplexity(model: PreTrainedModel, ids: torch.Tensor) -> float:
    rows = ids[: len(ids) // _ROW_TOKENS * _ROW_TOKENS].view(-1, _ROW_TOKENS)
    with torch.no_grad():
        return math.exp(float(_loss(model, rows)))


def _loss(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=rows).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one core: a model so small gains nothing from two, and loses if they are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
