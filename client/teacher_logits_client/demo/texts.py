"""The text as the models take it: rows of token ids to train on, and others to measure with.

Both are cut into rows of equal length without overlap; what does not fill a row is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from teacher_logits.errors import ConfigError
from teacher_logits.tokenizer import Tokenizer, fingerprint_of, id_count
from teacher_logits_client.demo.corpus import topics_text, unigram_perplexity

if TYPE_CHECKING:
    from pathlib import Path


class Encoder(Tokenizer, Protocol):
    """What the demo asks of a tokenizer: one of ``transformers`` will do."""

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


def load_tokenizer(model: Path) -> Encoder:
    """Load the tokenizer of a model: a folder, or a GGUF file."""
    from transformers import AutoTokenizer

    if model.is_dir():
        tokenizer: Encoder = AutoTokenizer.from_pretrained(model, local_files_only=True)
    else:
        tokenizer = AutoTokenizer.from_pretrained(
            model.parent, gguf_file=model.name, local_files_only=True
        )
    return tokenizer


def make_texts(tokenizer: Encoder, *, row_tokens: int, held_out_rows: int) -> Texts:
    """Tokenise the corpus.

    Raises:
        ConfigError: the text does not fill one row.
    """
    train, held_out = (_rows(tokenizer, text, row_tokens) for text in topics_text())
    return Texts(
        train=train,
        held_out=held_out[:held_out_rows],
        vocabulary_size=id_count(tokenizer),
        fingerprint=fingerprint_of(tokenizer),
    )


def _rows(tokenizer: Encoder, text: str, row_tokens: int) -> torch.Tensor:
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    count = len(ids) // row_tokens
    if not count:
        raise ConfigError(
            f"the text has {len(ids)} tokens, which is less than one row of {row_tokens}",
            facts={"tokens": len(ids), "row_tokens": row_tokens},
        )
    return ids[: count * row_tokens].view(count, row_tokens)
