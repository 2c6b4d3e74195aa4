"""A teacher whose logits anybody can work out: a server runs it, and tests know its answers.

The state behind a position is an integer of the tokens up to there, and the logits are looked up
in a table by it: the same bits in every process, and many ties, since the table is coarse.

    python -m teacher_logits serve --engine tests.transport_suite.dense_teacher:make
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from teacher_logits_server.config import ServerConfig
from teacher_logits_server.engines import EngineProfile, Row

VOCABULARY_SIZE, HEAD_ROWS, MAX_ROW_TOKENS = 1500, 1536, 4096
PADDING_LOGIT = 60.0
"""What the columns behind the vocabulary hold: more than any token has."""

_TABLE_ENTRIES = 1 << 13
_CHUNK_POSITIONS = 5


@cache
def _table() -> torch.Tensor:
    entries = torch.randn(_TABLE_ENTRIES, generator=torch.Generator().manual_seed(7))
    return (entries * 24).round() / 8


def head_logits(token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of every position of a row, fp32 [L, HEAD_ROWS]."""
    states, state = [], 1
    for token in token_ids:
        state = (state * 1103 + token + 1) % 65521
        states.append(state)
    columns = torch.arange(HEAD_ROWS)
    places = torch.tensor(states).unsqueeze(1) * 131 + columns * 17
    logits = _table()[places % _TABLE_ENTRIES]
    logits[:, VOCABULARY_SIZE:] = PADDING_LOGIT
    return logits


class DenseTeacher:
    """The engine."""

    def __init__(self, *, tokenizer_fingerprint: str = "") -> None:
        self.profile = EngineProfile(
            name="dense",
            vocabulary_size=VOCABULARY_SIZE,
            head_rows=HEAD_ROWS,
            max_row_tokens=MAX_ROW_TOKENS,
            arithmetic_type="float32",
            revision="1",
            tokenizer_fingerprint=tokenizer_fingerprint,
        )

    def logits(self, rows: Sequence[Row]) -> Iterator[torch.Tensor]:
        """Yield a few positions at a time, across the rows' borders."""
        wanted = [
            head_logits(row.token_ids.tolist())[row.first : row.first + row.count] for row in rows
        ]
        yield from torch.cat(wanted).split(_CHUNK_POSITIONS)


def make(config: ServerConfig) -> DenseTeacher:
    """Make the engine; what ``serve`` calls."""
    del config
    torch.set_num_threads(1)
    return DenseTeacher()
