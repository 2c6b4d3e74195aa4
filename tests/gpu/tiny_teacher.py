"""A teacher in plain torch for the engine's stage: no weights to load, no transformers. No test.

    serve --engine tests.gpu.tiny_teacher:make --device cuda:0

Its weights follow from a seed, so that another process has the same teacher. A position's state is
the mean of the embeddings up to it: later tokens cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VOCABULARY = 4096
HIDDEN = 64
CHUNK_POSITIONS = 4096
_BUSY_SIDE, _BUSY_PRODUCTS = 8192, 8


class Row(Protocol):
    """What the server asks of a row; see ``teacher_logits_server.engines.Row``."""

    token_ids: torch.Tensor
    first: int
    count: int


@dataclass(frozen=True, kw_only=True)
class TinyProfile:
    """What it says of itself."""

    name: str = "tiny"
    vocabulary_size: int = VOCABULARY
    head_rows: int = VOCABULARY
    max_row_tokens: int = 8192
    arithmetic_type: str = "float32"
    revision: str = "1"
    tokenizer_fingerprint: str = ""


class TinyTeacher:
    """An engine: ``logits`` on its device, behind a kernel that takes a while there."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(17)
        self.profile = TinyProfile()
        self._device = device
        self._embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(device)
        self._head = torch.randn(HIDDEN, VOCABULARY, generator=generator).to(device)

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield the wanted positions' logits, fp32 [c, V], without waiting for the device."""
        for row in rows:
            wanted = self._states(row.token_ids)[row.first : row.first + row.count]
            for start in range(0, row.count, CHUNK_POSITIONS):
                self._be_busy()
                yield wanted[start : start + CHUNK_POSITIONS] @ self._head

    def of_row(self, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Return the logits of a row's first positions."""
        return self._states(token_ids)[:count] @ self._head

    def _states(self, token_ids: torch.Tensor) -> torch.Tensor:
        ids = token_ids.to(self._device)
        counts = torch.arange(1, len(ids) + 1, device=self._device)
        return self._embedding[ids].cumsum(0) / counts.unsqueeze(1)

    def _be_busy(self) -> None:
        """Have a kernel stand before the head: what is not waited for is not there (T07)."""
        if self._device.type == "cuda":
            side = torch.ones(_BUSY_SIDE, _BUSY_SIDE, device=self._device, dtype=torch.float16)
            for _ in range(_BUSY_PRODUCTS):
                side = side @ side


def make(config: object) -> TinyTeacher:
    """Make it on the device that the server was given; on the CPU where torch has no CUDA."""
    named = str(getattr(config, "device", "cpu"))
    return TinyTeacher(torch.device(named if torch.cuda.is_available() else "cpu"))


def rows_of(count: int, tokens: int) -> list[list[int]]:
    """Return rows to be scored; every number follows from the sizes."""
    generator = torch.Generator().manual_seed(count * tokens)
    rows: list[list[int]] = torch.randint(
        0, VOCABULARY, (count, tokens), generator=generator
    ).tolist()
    return rows
