"""English text that is on every machine: the documentation inside the standard library.

``pydoc_data.topics`` is what ``help("CLASSES")`` shows, about half a megabyte. Its topics
repeat one another: ``compound`` holds all of ``for``, and ``else`` is ``if`` once more. So a
paragraph is taken once, and none of the held-out ones is in the training text.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HELD_OUT_EVERY = 8
"""Of the topics in alphabetical order, every eighth is held out."""


@functools.cache
def topics_text() -> tuple[str, str]:
    """Return (training text, held-out text); the same for one release of Python.

    Both are whole paragraphs in the order of their topics, with blank lines between.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)
    held_out_names = names[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    seen: set[str] = set()
    held_out = _paragraphs(topics, held_out_names, seen)
    train = _paragraphs(topics, [n for n in names if n not in set(held_out_names)], seen)
    return "\n\n".join(train), "\n\n".join(held_out)


def _paragraphs(topics: dict[str, str], names: list[str], seen: set[str]) -> list[str]:
    """Return the paragraphs of some topics that were not seen before."""
    fresh = []
    for name in names:
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                fresh.append(paragraph)
    return fresh


def unigram_perplexity(train_ids: Sequence[int], ids: Sequence[int], *, id_count: int) -> float:
    """Return the perplexity of ``ids`` under the token frequencies of ``train_ids``.

    Each of the ``id_count`` ids counts once more than it is there, so that none is impossible.
    A model that has learnt to use its context is below it.
    """
    counts = Counter(train_ids)
    total = len(train_ids) + id_count
    return math.exp(-sum(math.log((counts[each] + 1) / total) for each in ids) / len(ids))
