"""Tokenizers, of which a handshake needs two things: how many ids there are, and a fingerprint.

Nobody tokenises here, students send ids. The fingerprint lets a session find out that both
sides mean the same token by the same id; each side takes it of its own tokenizer.
"""

from __future__ import annotations

import json
from typing import Protocol

from teacher_logits.digest import tokenizer_fingerprint
from teacher_logits.errors import RequestInvalidError


class Tokenizer(Protocol):
    """What we ask of a tokenizer: one of ``transformers`` will do."""

    def get_vocab(self) -> dict[str, int]:
        """Return every token with its id, the added ones included."""

    def get_added_vocab(self) -> dict[str, int]:
        """Return the added and special tokens with their ids."""


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Return ``digest.tokenizer_fingerprint`` of a tokenizer of ``transformers``.

    The normaliser is the JSON of the fast tokenizer's own, keys sorted and without spaces;
    empty where it has none, as with slow tokenizers.

    Raises:
        RequestInvalidError: it is no tokenizer, such as the name of one.
    """
    _check(tokenizer)
    return tokenizer_fingerprint(
        vocabulary=tokenizer.get_vocab(),
        added_tokens=tokenizer.get_added_vocab(),
        normalizer=_normalizer(tokenizer),
    )


def id_count(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id: ``len`` would miss ids behind a gap.

    Raises:
        RequestInvalidError: as for ``fingerprint_of``.
    """
    _check(tokenizer)
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _check(tokenizer: object) -> None:
    if not (hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "get_added_vocab")):
        raise RequestInvalidError(
            f"a {type(tokenizer).__name__} was given where a tokenizer is due: give the object "
            "itself, such as transformers.AutoTokenizer.from_pretrained(...)",
            facts={"given": type(tokenizer).__name__},
        )


def _normalizer(tokenizer: Tokenizer) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ""
    described = json.loads(backend.to_str()).get("normalizer")
    return json.dumps(described, sort_keys=True, separators=(",", ":")) if described else ""
