"""A teacher of one's own: believes that the token which was there most often comes next.

    teacher-logits serve --engine own_engine:make --listen unix:/tmp/own/teacher.sock

Run it in this folder, or with the folder on PYTHONPATH.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from teacher_logits_server.engines import EngineProfile, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits_server.config import ServerConfig


class CountingTeacher:
    """What the server needs of an engine: a profile, and logits a chunk at a time."""

    profile = EngineProfile(
        name="counting",
        vocabulary_size=256,
        head_rows=256,
        max_row_tokens=1024,
        arithmetic_type="float32",
    )

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield [count, 256] for each row: position s speaks of token s + 1."""
        for row in rows:  # row.token_ids: int64 [L]
            seen = torch.nn.functional.one_hot(row.token_ids, 256).cumsum(0).float()
            yield seen[row.first : row.first + row.count]


def make(config: ServerConfig) -> CountingTeacher:
    """Make the engine; ``config`` holds the server's settings."""
    return CountingTeacher()


if __name__ == "__main__":
    sys.exit(
        "usage: teacher-logits serve --engine own_engine:make      it is no program, but a teacher"
    )
