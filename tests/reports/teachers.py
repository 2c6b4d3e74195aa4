"""Teachers that the tests hold up, spoil and count, each the dense one but for that."""

import threading
from collections.abc import Iterator, Sequence

import torch
from tests.transport_suite.dense_teacher import DenseTeacher

from teacher_logits_server.engines import EngineProfile, Row

#: A position whose token is this has logits that no teacher should have; once `is_spoilt`.
NAN_TOKEN, INFINITY_TOKEN, NOTHING_TOKEN, RAISING_TOKEN = 1400, 1401, 1402, 1403
ENGINES_OWN_WORDS = "CUDA error: an illegal memory access was encountered"


class TriedTeacher(DenseTeacher):
    """The dense teacher, which counts its passes, waits at a gate and can be spoilt."""

    def __init__(self, *, tokenizer_fingerprint: str = "") -> None:
        super().__init__(tokenizer_fingerprint=tokenizer_fingerprint)
        self.passes = 0
        self.is_spoilt = False
        self.gate = threading.Event()
        self.gate.set()

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield the dense teacher's logits, a row at a time."""
        self.passes += 1
        self.gate.wait(30)
        for row in rows:
            wanted = row.token_ids[row.first : row.first + row.count]
            for chunk, tokens in zip(super().logits([row]), wanted.split(5), strict=True):
                yield self._spoil(chunk, tokens) if self.is_spoilt else chunk

    def _spoil(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if bool((tokens == RAISING_TOKEN).any()):
            raise RuntimeError(ENGINES_OWN_WORDS)
        logits[tokens == NAN_TOKEN, 3] = torch.nan
        logits[tokens == INFINITY_TOKEN, 3] = torch.inf
        logits[tokens == NOTHING_TOKEN] = -torch.inf
        return logits


BEST_COLUMN = 152_000


class WideTeacher:
    """A teacher with a head as wide as a large model's; nothing but the last token counts."""

    def __init__(self, *, vocabulary_size: int, head_rows: int) -> None:
        self.profile = EngineProfile(
            name="wide",
            vocabulary_size=vocabulary_size,
            head_rows=head_rows,
            max_row_tokens=64,
            arithmetic_type="float32",
        )

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield a position at a time."""
        for row in rows:
            for token in row.token_ids[row.first : row.first + row.count].tolist():
                yield self.of(token).unsqueeze(0)

    def of(self, token: int) -> torch.Tensor:
        """Return the logits behind a token [V]; the highest by far is that of `BEST_COLUMN`."""
        columns = torch.arange(self.profile.head_rows)
        logits = ((columns * 7919 + token * 104729) % 4093) / 512 + columns / 20000
        logits[columns == BEST_COLUMN] += 20
        return logits
