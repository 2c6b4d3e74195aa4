"""A teacher that answers at once: the benchmarks move what it says, and do not wait for it.

    python -m teacher_logits serve --engine benchmarks.teacher:make

A row of logits is looked up in a table, by the token that stands there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits_server.engines import EngineProfile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines import Row

VOCABULARY = 128
MAX_ROW_TOKENS = 1 << 15


class TableTeacher:
    """The engine."""

    profile = EngineProfile(
        name="table",
        vocabulary_size=VOCABULARY,
        head_rows=VOCABULARY,
        max_row_tokens=MAX_ROW_TOKENS,
        arithmetic_type="float32",
        revision="1",
    )

    def __init__(self) -> None:
        torch.set_num_threads(1)
        chance = torch.Generator().manual_seed(0)
        self._table = torch.randn(VOCABULARY, VOCABULARY, generator=chance)

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield each row's logits."""
        for row in rows:
            yield self._table[row.token_ids[row.first : row.first + row.count]]


def make(config: ServerConfig) -> TableTeacher:
    """Make the engine; what ``serve`` calls."""
    del config
    return TableTeacher()
