"""A teacher of few lines for replicas: what it says follows from the tokens, and some do harm.

    --replica-engine tests.server.replicas.teacher:make --model FOLDER

The folder is where it and its test leave word for one another: a file `held-PID` says that a
replica computes a row with `HOLD`, which it goes on with once there is a file `go`.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from teacher_logits_server.engines import EngineProfile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from teacher_logits_server.config import ServerConfig
    from teacher_logits_server.engines import Row

VOCABULARY, HEAD_ROWS = 60, 64
DIE, RAISE, HOLD, NAN = 59, 58, 57, 56
"""Tokens at which it ends its process, raises, waits, or says NaN."""
MOST = 56
"""Tokens below are harmless."""
SHORT = 8
"""Tokens of a row that is heeded; longer ones are the probe's, of any tokens."""


class Teacher:
    """Half of what it said before, and something for the token."""

    def __init__(self, folder: Path, *, revision: str = "r1") -> None:
        self.profile = EngineProfile(
            name="halving",
            vocabulary_size=VOCABULARY,
            head_rows=HEAD_ROWS,
            max_row_tokens=64,
            arithmetic_type="float32",
            revision=revision,
        )
        self._folder = folder

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield a row at a time."""
        for row in rows:
            tokens = row.token_ids.tolist()
            own = set(tokens) if len(tokens) <= SHORT else set()
            self._heed(own)
            places = torch.arange(HEAD_ROWS, dtype=torch.float32)
            state, said = torch.zeros(HEAD_ROWS), []
            for token in tokens:
                state = 0.5 * state + 4.0 * torch.sin((token + 1.0) * (places + 1.0) * 0.37)
                said.append(state * torch.nan if NAN in own else state)
            yield torch.stack(said)[row.first : row.first + row.count].clone()

    def _heed(self, tokens: set[int]) -> None:
        if DIE in tokens:
            os._exit(7)
        if RAISE in tokens:
            raise ArithmeticError("words that must not leave the server")
        if HOLD in tokens:
            (self._folder / f"held-{os.getpid()}").touch()
            while not (self._folder / "go").exists():
                threading.Event().wait(0.01)


def make(config: ServerConfig) -> Teacher:
    """Make one."""
    return Teacher(Path(config.model))


def make_moody(config: ServerConfig) -> Teacher:
    """Make one whose weights differ from process to process."""
    return Teacher(Path(config.model), revision=str(os.getpid()))


def fail(config: ServerConfig) -> Teacher:
    """Make none."""
    raise FileNotFoundError(f"no weights in {config.model}")


def never(config: ServerConfig) -> Teacher:
    """Never come to an end."""
    threading.Event().wait()
    raise AssertionError
