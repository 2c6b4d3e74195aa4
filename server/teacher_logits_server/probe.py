"""The causality probe: run once when a server starts, its result shown in every session.

Scores a few random rows by the way that students' rows take, so that a mistake anywhere on it
shows: an engine that looks ahead or hands out its distributions one token late, rows that feel
the padding or the rows beside them. Works for an untrained teacher and needs no labels
(``teacher_logits.causality`` judges; math note 6.4).

Refuses (``AlignmentError``) a teacher whose answer for position s is not one for the tokens up
to s, or so noisy that nobody can tell.
"""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING

from teacher_logits.causality import Verdict, causality_verdict, worst
from teacher_logits.errors import AlignmentError, PayloadInvalidError
from teacher_logits.layout import ElementType, top_k_columns
from teacher_logits.terms import Check
from teacher_logits.terms import Verdict as CheckVerdict
from teacher_logits_server.engines.answers import Answer, Part, fill
from teacher_logits_server.engines.requests import read_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from teacher_logits.selection import Selection
    from teacher_logits_server.engines import Engine

CHECK_NAME = "causality"
ROW_TOKENS = 16
# A longer row beside the probed ones, so that they are padded.
NEIGHBOUR_TOKENS = 23
TOP_K = 16
_SEED = 20240607


def probe_causality(engine: Engine) -> Check:
    """Probe a teacher.

    Raises:
        AlignmentError: saying which token was changed, which position moved first, and what
            that means.
    """
    profile = engine.profile
    if profile.vocabulary_size < 2:
        return Check(
            name=CHECK_NAME,
            verdict=CheckVerdict.UNCHECKED,
            detail=f"a vocabulary of {profile.vocabulary_size} has no token to change",
        )
    chance = random.Random(_SEED)
    length = min(ROW_TOKENS, profile.max_row_tokens)
    base = _tokens(chance, length, profile.vocabulary_size)
    beside = _tokens(chance, min(NEIGHBOUR_TOKENS, profile.max_row_tokens), profile.vocabulary_size)
    places = sorted({0, length // 2, length - 1})
    changed = [_changed(base, place, profile.vocabulary_size) for place in places]
    together = _score(engine, [base, *changed, beside])
    alone = _signature(_score(engine, [base]), profile.vocabulary_size)
    first, *others = (
        _signature(together[length * row : length * (row + 1)], profile.vocabulary_size)
        for row in range(1 + len(places))
    )
    probes = [
        causality_verdict(first, alone, other, position=place)
        for other, place in zip(others, places, strict=True)
    ]
    bad = worst(probes)
    if bad.verdict is not Verdict.OK:
        raise AlignmentError(
            f"the causality probe of engine {profile.name} failed, {bad}: mend the engine, whose "
            "logits at position s must be the distribution of token s + 1 given tokens 0 to s",
            facts={
                "verdict": bad.verdict.value,
                "position": bad.position,
                "first_changed": -1 if bad.first_changed is None else bad.first_changed,
                "noise": bad.noise,
                "threshold": bad.threshold,
            },
        )
    return Check(
        name=CHECK_NAME,
        verdict=CheckVerdict.PASSED,
        detail=(
            f"of {length} positions the first to move was the one whose token was changed "
            f"({', '.join(map(str, places))}); two runs of a row differ by {bad.noise:.1e}"
        ),
    )


def _tokens(chance: random.Random, length: int, vocabulary_size: int) -> list[int]:
    return [chance.randrange(vocabulary_size) for _ in range(length)]


def _changed(tokens: Sequence[int], place: int, vocabulary_size: int) -> list[int]:
    other = (tokens[place] + max(1, vocabulary_size // 2)) % vocabulary_size
    return [*tokens[:place], other, *tokens[place + 1 :]]


def _signature(selection: Selection, vocabulary_size: int) -> Tensor:
    """Return what tells one distribution from another: a value an id, and the normaliser, [P,V+1].

    An id that was not kept counts with the least that was, so that two near-equal ids which
    change places from run to run hardly show.
    """
    values = selection.topk_logprobs
    dense = values[:, -1:].repeat(1, vocabulary_size + 1)
    ids = selection.topk_ids.long()
    dense.scatter_(1, ids.masked_fill(ids < 0, vocabulary_size), values)
    dense[:, -1] = selection.logsumexp[:, 0]
    return dense


def _score(engine: Engine, rows: Sequence[Sequence[int]]) -> Selection:
    """Score rows in one pass, into memory of this process."""
    request = read_request(
        input_ids=b"".join(array("i", row).tobytes() for row in rows),
        row_lengths=[len(row) for row in rows],
    )
    columns, size_bytes = top_k_columns(
        row_count=request.row_count,
        position_count=request.position_count,
        top_k=min(TOP_K, engine.profile.vocabulary_size),
        temperature_count=1,
        value_type=ElementType.FLOAT32,
    )
    answer = Answer(
        request,
        room=bytearray(size_bytes),
        columns=columns,
        temperatures=(1.0,),
        vocabulary_size=engine.profile.vocabulary_size,
    )
    fill(
        engine,
        [Part(answer=answer, first_row=0, row_count=request.row_count)],
        wanted=lambda: True,
    )
    try:
        answer.finish(mask=False)
    except PayloadInvalidError as error:
        raise AlignmentError(
            f"engine {engine.profile.name} cannot be probed for causality: {error.message}",
            facts=error.facts,
        ) from error
    return answer.selection
