"""A teacher that takes its time, as one on a machine of its own: it uses none of ours.

python -m teacher_logits serve --engine benchmarks.paced_teacher:make_6     # 6 ms a row
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.teacher import TableTeacher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines import Row


class PacedTeacher(TableTeacher):
    """The engine: a table's answers, each row not before its time."""

    def __init__(self, seconds_a_row: float) -> None:
        super().__init__()
        self._seconds_a_row = seconds_a_row

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield each row's logits."""
        for each in super().logits(rows):
            time.sleep(self._seconds_a_row)
            yield each


def __getattr__(name: str) -> Callable[[ServerConfig], PacedTeacher]:
    """Return ``make_N``, which makes one of N milliseconds a row; what ``serve`` calls."""
    what, _, milliseconds = name.partition("_")
    if what != "make" or not milliseconds.isdecimal():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda config: PacedTeacher(int(milliseconds) / 1000)
