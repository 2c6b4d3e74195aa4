"""The causality probe: run once when a server starts, its result shown in every session.

Scores a few random rows by the way that students' rows take, so that a mistake anywhere on it
shows: an engine that looks ahead or hands out its distributions one token late, rows that feel
the padding or the rows beside them. Works for an untrained teacher and needs no labels.
``teacher_logits.selection.causality`` judges (docs/math.md, "How a shift is found").

Refuses (``AlignmentError``) a teacher whose answer for position s is not one for the tokens up
to s, or so noisy that nobody can tell.
"""

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING

from teacher_logits.errors import (
    AlignmentError,
    EngineError,
    PayloadInvalidError,
    TeacherLogitsError,
)
from teacher_logits.layout import ElementType, top_k_columns
from teacher_logits.payload_room import HostRoom
from teacher_logits.selection.causality import CausalityProbe, Verdict, causality_verdict, worst
from teacher_logits.selection_rules import TopK
from teacher_logits.terms import Check
from teacher_logits.terms import Verdict as CheckVerdict
from teacher_logits_server.engines import words_of
from teacher_logits_server.engines.answers import Answer, Part, fill
from teacher_logits_server.engines.keepers import TopKKeeper, Wanted
from teacher_logits_server.engines.passes import PassEngine
from teacher_logits_server.engines.requests import read_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from teacher_logits.selection import Selection
    from teacher_logits_server.engines import Engine
    from teacher_logits_server.engines.passes import ServedEngine

CHECK_NAME = "causality"
ROW_TOKENS = 16
# A longer row beside the probed ones, so that they are padded.
NEIGHBOUR_TOKENS = 23
TOP_K = 64
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
    rows = [base, *(_changed(base, place, profile.vocabulary_size) for place in places), base]
    first, *changed, again = _signatures(engine, [*rows, beside], length)[: len(rows)]
    rerun = _signatures(engine, [*rows, beside], length)[0]
    [alone] = _signatures(engine, [base], length)
    # Noise is what the engine makes of one row in another place, and at another time.
    repeat = max(again, rerun, key=lambda signature: _gap(first, signature))
    probes = [
        causality_verdict(first, repeat, other, position=place)
        for other, place in zip(changed, places, strict=True)
    ]
    bad = worst(probes)
    if bad.verdict is not Verdict.OK:
        raise _refuse(profile.name, bad)
    effects = [_gap(first[at], other[at]) for other, at in zip(changed, places, strict=True)]
    beside_gap = _gap(first, alone)
    if beside_gap > min(effects) / 2:
        raise _refuse_padding(profile.name, beside_gap, min(effects))
    return Check(
        name=CHECK_NAME,
        verdict=CheckVerdict.PASSED,
        detail=(
            f"of {length} positions the first to move was the one whose token was changed "
            f"({', '.join(map(str, places))}); two runs differ by {bad.noise:.1e}, a row alone "
            f"and beside others by {beside_gap:.1e}"
        ),
    )


def probe_engine(engine: ServedEngine) -> Check:
    """Probe a teacher's causality, which is also the first that is asked of an engine.

    One that computes elsewhere was probed there.

    Raises:
        AlignmentError: it is not causal.
        EngineError: it failed, or its logits have another shape than its profile says.
    """
    if isinstance(engine, PassEngine):
        return engine.check
    try:
        return probe_causality(engine)
    except TeacherLogitsError:
        raise
    except Exception as error:
        raise EngineError(
            f"engine {engine.profile.name} failed on the first rows it was tried with "
            f"({words_of(error)}): mend it; `logits(rows)` yields tensors "
            f"[positions, {engine.profile.head_rows}], as its profile says; --log-level debug "
            "shows where",
            facts={"engine": engine.profile.name, "error": type(error).__name__},
        ) from error


def _refuse_padding(engine_name: str, gap: float, least_effect: float) -> AlignmentError:
    return AlignmentError(
        f"engine {engine_name} answers {gap:.2g} otherwise for a row beside longer ones than for "
        f"the same row alone, and a changed token makes {least_effect:.2g}: mend the engine, in "
        "which padding must not reach a row's own positions",
        facts={"gap": gap, "least_effect": least_effect},
    )


def _refuse(engine_name: str, probe: CausalityProbe) -> AlignmentError:
    return AlignmentError(
        f"the causality probe of engine {engine_name} failed, {probe}: mend the engine, whose "
        "logits at position s must be the distribution of token s + 1 given tokens 0 to s",
        facts={
            "verdict": probe.verdict.value,
            "position": probe.position,
            "first_changed": -1 if probe.first_changed is None else probe.first_changed,
            "noise": probe.noise,
            "threshold": probe.threshold,
        },
    )


def _tokens(chance: random.Random, length: int, vocabulary_size: int) -> list[int]:
    return [chance.randrange(vocabulary_size) for _ in range(length)]


def _changed(tokens: Sequence[int], place: int, vocabulary_size: int) -> list[int]:
    other = (tokens[place] + max(1, vocabulary_size // 2)) % vocabulary_size
    return [*tokens[:place], other, *tokens[place + 1 :]]


def _signatures(engine: Engine, rows: Sequence[Sequence[int]], length: int) -> list[Tensor]:
    """Score rows in one pass; of each with ``length`` tokens return what tells it, [L,V+1].

    That is a value an id, and the normaliser. An id that was not kept counts with the least
    that was, so that two near-equal ids which change places from run to run hardly show.
    """
    selection = _score(engine, rows)
    vocabulary_size = engine.profile.vocabulary_size
    signatures = []
    for row, tokens in enumerate(rows):
        if len(tokens) != length:
            break  # the one beside them, the last
        part = selection[length * row : length * (row + 1)]
        dense = part.topk_logprobs[:, -1:].repeat(1, vocabulary_size + 1)
        ids = part.topk_ids.long()
        dense.scatter_(1, ids.masked_fill(ids < 0, vocabulary_size), part.topk_logprobs)
        dense[:, -1] = part.logsumexp[:, 0]
        signatures.append(dense)
    return signatures


def _gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; equal infinities do not differ."""
    return float((a - b).nan_to_num(nan=0.0).abs().max())


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
        room=HostRoom(memoryview(bytearray(size_bytes))),
        columns=columns,
        wanted=Wanted(
            selection=TopK(), temperatures=(1.0,), vocabulary_size=engine.profile.vocabulary_size
        ),
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
            f"engine {engine.profile.name} was probed with a few random rows before any student "
            f"was let in, and failed: {error.message.partition(' (')[0]}. Mend the engine: its "
            "logits may hold -inf where a token is ruled out, and no NaN or +inf",
            facts=error.facts,
        ) from error
    keeper = answer.keeper
    if not isinstance(keeper, TopKKeeper):
        raise TypeError(f"{type(keeper).__name__} keeps no best entries")
    return keeper.selection
