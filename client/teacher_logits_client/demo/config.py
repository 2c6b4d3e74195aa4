"""What the demo is told, and where it keeps the model that it fetched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from teacher_logits.errors import ConfigError

if TYPE_CHECKING:
    from teacher_logits.transport import Transport

MAX_THREADS = 4
"""More threads would not help models of this size."""


@dataclass(frozen=True, kw_only=True)
class StudentSize:
    """The student's layers; as many columns as the teacher has ids come on top."""

    width: int
    layer_count: int
    head_count: int


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of one run. Rows are of ``row_tokens`` tokens each.

    ``steps`` and ``seconds`` both end the training, whichever comes first; the learning rate
    falls to its end with whichever is nearer. ``transports`` empty means any.
    """

    teacher: str
    transports: tuple[Transport, ...]
    steps: int
    seconds: float
    output: Path
    cache: Path
    row_tokens: int
    rows_per_step: int
    held_out_rows: int
    top_k: int
    requests_ahead: int
    learning_rate: float
    student: StudentSize
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: naming the flag.
        """
        if self.steps < 1:
            raise ConfigError(
                f"--steps {self.steps}: give at least 1",
                facts={"flag": "--steps", "value": self.steps},
            )
        if not 0 < self.seconds <= 86400:
            raise ConfigError(
                f"--seconds {self.seconds:g}: give more than 0 and at most 86400",
                facts={"flag": "--seconds", "value": self.seconds},
            )


def default_cache_folder() -> Path:
    """Return this user's folder for things that can be fetched again."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return root / "teacher-logits"


def threads_a_side() -> int:
    """Return how many threads teacher and student may each use: half of the cores, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MAX_THREADS, (cores or 1) // 2))
