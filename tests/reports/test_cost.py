"""What scoring may cost: R05, R06, R07. Rates are in ``benchmarks/``."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.reports.conftest import POOL_BYTES, Tried
from tests.reports.raw import TIMEOUT_SECONDS, a_request, refused
from tests.transport_suite.dense_teacher import MAX_ROW_TOKENS, VOCABULARY_SIZE
from tests.transport_suite.writing import a_profile

from teacher_logits.errors import (
    PayloadInvalidError,
    SessionRefusedError,
    TeacherLogitsError,
)
from teacher_logits_client import Transport

FEW, MANY = 512, 2048
MOST = 8192


@dataclass(frozen=True)
class Peaks:
    """Bytes by which memory rose: what a chunk takes by the formula, and what was measured."""

    chunk_bytes: int
    few: int
    many: int


@pytest.fixture(scope="module")
def peaks() -> Peaks:
    """Of the built-in engine at a vocabulary of 150,000, in a process of its own."""
    return peaks_of(FEW, MANY)


def peaks_of(few: int, many: int) -> Peaks:
    script = Path(__file__).with_name("peak_memory.py")
    ran = subprocess.run(
        [sys.executable, script, str(few), str(many)], capture_output=True, check=True, text=True
    )
    found = json.loads(ran.stdout)
    return Peaks(found["chunk_bytes"], found["peaks"][str(few)], found["peaks"][str(many)])


def test_r05_memory_does_not_grow_with_the_tokens_scored(peaks: Peaks) -> None:
    assert peaks.many <= peaks.few * 1.3
    whole = MANY * 150_000 * 4
    assert peaks.many < whole / 10


@pytest.mark.slow
def test_r05_nor_with_the_most_that_a_row_has() -> None:
    most = peaks_of(FEW, MOST)
    assert most.many <= most.few * 1.3
    assert 0.75 * most.chunk_bytes <= most.many <= 1.25 * most.chunk_bytes


def test_r06_memory_is_what_the_formula_of_a_chunk_says(peaks: Peaks) -> None:
    for peak in (peaks.few, peaks.many):
        assert 0.75 * peaks.chunk_bytes <= peak <= 1.25 * peaks.chunk_bytes


def test_r07_k_of_the_vocabulary_is_refused_at_the_door(tried: Tried) -> None:
    with pytest.raises(SessionRefusedError, match="top_k is 1500; the teacher gives at most 1024"):
        tried.client.open_session(a_profile(top_k=VOCABULARY_SIZE))


@pytest.mark.parametrize(
    ("rows", "kind", "facts"),
    [
        (25, PayloadInvalidError, {"tokens": 25 * MAX_ROW_TOKENS, "limit": 65536}),
        (16, PayloadInvalidError, {"budget_bytes": POOL_BYTES}),
    ],
    ids=["100k-tokens", "64k-tokens-of-1024-entries"],
)
def test_r07_a_request_of_gigabytes_is_refused_before_anything_is_made_for_it(
    tried: Tried, rows: int, kind: type[TeacherLogitsError], facts: dict[str, int]
) -> None:
    profile = a_profile(top_k=1024, transports=(Transport.STREAM,))
    with tried.client.open_session(profile) as session:
        passes, before = tried.teacher.passes, tried.server.usage
        request = a_request(
            session.terms.session_id,
            input_ids=bytes(4 * rows * MAX_ROW_TOKENS),
            row_lengths=[MAX_ROW_TOKENS] * rows,
        )
        answer = refused(lambda: tried.raw.scoring.Score(request, timeout=TIMEOUT_SECONDS))
        assert isinstance(answer.error, kind)
        assert facts.items() <= answer.error.facts.items()
        assert (tried.teacher.passes, tried.server.usage) == (passes, before)


def test_r07_what_fits_the_pool_and_not_beside_others_waits_and_is_answered(tried: Tried) -> None:
    """Three quarters of the pool each: one at a time."""
    rows = [[1] * (POOL_BYTES * 3 // 4 // (1024 * 6))]
    with tried.client.open_session(a_profile(top_k=1024)) as session:
        futures = [session.score(rows) for _ in range(3)]
        for future in futures:
            with future.result() as leased:
                assert leased.payload.size_bytes > POOL_BYTES // 2
