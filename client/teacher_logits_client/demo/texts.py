"""The text as the models take it: rows of token ids to train on, and others to measure with.

Both are cut into rows of equal length without overlap; what does not fill a row is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from teacher_logits.digest import tokenizer_fingerprint
from teacher_logits.errors import ConfigError
from teacher_logits_client.demo.corpus import topics_text, unigram_perplexity

if TYPE_CHECKING:
    from pathlib import Path


class Backend(Protocol):
    """The part of a tokenizer that knows how it is made."""

    def to_str(self) -> str:
        """Return the tokenizer as JSON."""


class Tokenizer(Protocol):
    """What the demo asks of a tokenizer: a fast one of ``transformers`` will do."""

    @property
    def backend_tokenizer(self) -> Backend:
        """Return what the tokenizer is made of."""

    def get_vocab(self) -> dict[str, int]:
        """Return every token with its id, the added ones included."""

    def get_added_vocab(self) -> dict[str, int]:
        """Return the added and special tokens with their ids."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """Rows of token ids, int64: ``train`` [N,S] and ``held_out`` [M,S].

    ``vocabulary_size`` counts the tokenizer's ids; ``fingerprint`` is that of the tokenizer.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    vocabulary_size: int
    fingerprint: str

    def unigram_perplexity(self) -> float:
        """Return the held-out perplexity of the training text's token frequencies.

        Measured where a model is: on all tokens of a row but the first.
        """
        return unigram_perplexity(
            self.train.flatten().tolist(),
            self.held_out[:, 1:].flatten().tolist(),
            id_count=self.vocabulary_size,
        )


def load_tokenizer(model: Path) -> Tokenizer:
    """Load the tokenizer of a model: a folder, or a GGUF file."""
    from transformers import AutoTokenizer

    if model.is_dir():
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    else:
        tokenizer = AutoTokenizer.from_pretrained(
            model.parent, gguf_file=model.name, local_files_only=True
        )
    return tokenizer


def make_texts(tokenizer: Tokenizer, *, row_tokens: int, held_out_rows: int) -> Texts:
    """Tokenise the corpus.

    Raises:
        ConfigError: the text does not fill one row.
    """
    train, held_out = (_rows(tokenizer, text, row_tokens) for text in topics_text())
    return Texts(
        train=train,
        held_out=held_out[:held_out_rows],
        vocabulary_size=max(tokenizer.get_vocab().values()) + 1,
        fingerprint=_fingerprint(tokenizer),
    )


def _rows(tokenizer: Tokenizer, text: str, row_tokens: int) -> torch.Tensor:
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    count = len(ids) // row_tokens
    if not count:
        raise ConfigError(
            f"the text has {len(ids)} tokens, which is less than one row of {row_tokens}",
            facts={"tokens": len(ids), "row_tokens": row_tokens},
        )
    return ids[: count * row_tokens].view(count, row_tokens)


def _fingerprint(tokenizer: Tokenizer) -> str:
    """Return the fingerprint as the server makes it: the normaliser in compact, sorted JSON."""
    normalizer = json.loads(tokenizer.backend_tokenizer.to_str()).get("normalizer")
    return tokenizer_fingerprint(
        vocabulary=tokenizer.get_vocab(),
        added_tokens=tokenizer.get_added_vocab(),
        normalizer=json.dumps(normalizer, sort_keys=True, separators=(",", ":"))
        if normalizer
        else "",
    )
