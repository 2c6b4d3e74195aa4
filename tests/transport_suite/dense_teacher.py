"""A teacher whose logits anybody can work out: a server runs it, and tests know its answers.

The state behind a position is an integer of the tokens up to there, and the logits are looked up
in a table by it: the same bits in every process, and many ties, since the table is coarse.

    python -m teacher_logits serve --engine tests.transport_suite.dense_teacher:make
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What is right for the positions of one row, in fp64; K entries in the agreed order."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    log_tail: torch.Tensor
    logsumexp: torch.Tensor
    actual_logprob: torch.Tensor


def answer(
    row: Sequence[int], *, top_k: int, temperatures: Sequence[float], vocabulary_size: int
) -> Answer:
    """Work out the answer for a row, over the whole vocabulary."""
    logits = head_logits(row)[:, :vocabulary_size].double()
    logprobs = logits.log_softmax(1)
    ranked, order = logits.sort(dim=1, descending=True, stable=True)
    ids = order[:, :top_k]
    following = torch.tensor([*row[1:], 0]).unsqueeze(1)
    actual = logprobs.gather(1, following).squeeze(1)
    actual[-1] = 0.0
    scaled = [ranked / temperature for temperature in temperatures]
    normalisers = torch.stack([each.logsumexp(1) for each in scaled], 1)
    tails = torch.stack([each[:, top_k:].logsumexp(1) for each in scaled], 1)
    return Answer(
        ids=ids,
        logprobs=logprobs.gather(1, ids),
        log_tail=tails - normalisers,
        logsumexp=normalisers,
        actual_logprob=actual,
    )
