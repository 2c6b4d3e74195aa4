"""Values that users were given wrongly elsewhere: R10, R11, R19, R26, R35, R50."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
import torch
from tests.reports.conftest import FINGERPRINT, Tried
from tests.reports.teachers import (
    BEST_COLUMN,
    ENGINES_OWN_WORDS,
    INFINITY_TOKEN,
    NAN_TOKEN,
    NOTHING_TOKEN,
    RAISING_TOKEN,
    TriedTeacher,
    WideTeacher,
)
from tests.transport_suite.dense_teacher import VOCABULARY_SIZE
from tests.transport_suite.right import RAGGED, assert_near, assert_right
from tests.transport_suite.ways import WAYS, Way
from tests.transport_suite.writing import a_profile, embedded_server

import teacher_logits_client as tl
from teacher_logits.digest import tokenizer_fingerprint
from teacher_logits.errors import EngineError, PayloadInvalidError, SessionRefusedError
from teacher_logits.layout import RowStatus
from teacher_logits.wire.errors import code_of
from teacher_logits_client import Transport

FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


def assert_refused(client: tl.Client, profile: tl.StudentProfile, rule: str) -> tl.errors.Violation:
    """A session is refused for one rule, and not as an argument that is wrong by itself."""
    with pytest.raises(SessionRefusedError) as caught:
        client.open_session(profile)
    assert code_of(caught.value) is FAILED_PRECONDITION
    [violation] = caught.value.violations
    assert violation.rule == rule
    return violation


# R10: asked for 64 entries, got 20 and a lot of -inf


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tl.Client]:
    """A client of a server that gives 20 entries at most."""
    folder = tmp_path_factory.mktemp("capped")
    with (
        embedded_server(folder, pool_bytes=1 << 20, top_k=20) as server,
        tl.connect(server.address) as client,
    ):
        yield client


def test_r10_more_entries_than_the_teacher_gives_are_refused_with_both_numbers(
    capped: tl.Client,
) -> None:
    violation = assert_refused(capped, a_profile(top_k=64), "top_k_too_large")
    assert "64" in violation.message
    assert "20" in violation.message
    assert "--top-k" in violation.message


@pytest.mark.parametrize("top_k", [20, 19, 1])
def test_r10_never_fewer_entries_come_than_were_asked_for(capped: tl.Client, top_k: int) -> None:
    with capped.open_session(a_profile(top_k=top_k, value_type=tl.ElementType.FLOAT32)) as session:
        with session.score(RAGGED).result() as leased:
            assert leased.columns["topk_ids"].shape[1] == top_k
            assert bool((leased.columns["topk_ids"] >= 0).all())
            assert bool(leased.columns["topk_logprobs"].isfinite().all())
            assert_right(leased, RAGGED)


def test_r10_another_sessions_payload_with_fewer_entries_is_refused(capped: tl.Client) -> None:
    with (
        capped.open_session(a_profile(top_k=9)) as few,
        capped.open_session(a_profile(top_k=10)) as more,
        few.score(RAGGED).result() as leased,
    ):
        with pytest.raises(PayloadInvalidError, match="top_k is 9, this session's 10"):
            more.acquire(payload_id=leased.payload.payload_id)


# R11: NaN and infinities of the teacher, by policy; their bits are the transport suite's

BAD_ROWS = {
    NAN_TOKEN: (RowStatus.NAN, "a NaN"),
    INFINITY_TOKEN: (RowStatus.POSITIVE_INFINITY, r"a \+inf"),
    NOTHING_TOKEN: (RowStatus.EMPTY_SUPPORT, "nothing finite"),
}
WITH_A_BAD_ROW = ([3, 1, 4, 1, 5, 9, 2, 6], [0, 1498, 77, 3, 2, 1, 0], [1499])


@contextmanager
def spoilt(tried: Tried, way: Way) -> Iterator[tl.Session]:
    tried.teacher.is_spoilt = True
    profile = a_profile(top_k=8, transports=(way.transport,), value_type=tl.ElementType.FLOAT32)
    with tried.client.open_session(profile) as session:
        assert session.transport is way.transport
        yield session


def rows_with(token: int) -> list[list[int]]:
    """Rows of which the second has a token behind which the logits are bad."""
    rows = [list(row) for row in WITH_A_BAD_ROW]
    rows[1][5] = token
    return rows


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("token", BAD_ROWS)
def test_r11_a_row_that_cannot_be_scored_fails_its_request_by_row_and_position(
    tried: Tried, way: Way, token: int
) -> None:
    status, what = BAD_ROWS[token]
    with spoilt(tried, way) as session:
        future = session.score(rows_with(token))
        with pytest.raises(PayloadInvalidError, match=what) as caught:
            future.result()
        assert caught.value.facts == {
            "row": 1,
            "position": 5,
            "row_status": int(status),
            "bad_rows": 1,
        }
        assert "mask" in caught.value.message


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("token", BAD_ROWS)
def test_r11_a_masked_row_is_named_teaches_nothing_and_harms_no_other(
    tried: Tried, way: Way, token: int
) -> None:
    status, _ = BAD_ROWS[token]
    rows = rows_with(token)
    with spoilt(tried, way) as session:
        with session.score(rows, bad_rows="mask").result() as leased:
            assert leased.columns["row_status"].tolist() == [0, int(status), 0]
            assert leased.payload.bad_row_count == 1
            targets = leased.targets
            starts = leased.row_offsets.tolist()
            bad = slice(starts[1], starts[2])
            assert not bool(targets.valid[bad].any())
            assert bool((leased.columns["topk_ids"][bad] == -1).all())
            for tensor in (targets.topk_logprobs, targets.log_tail, targets.actual_logprob):
                assert tensor is not None
                assert bool(tensor.isfinite().all())
            logits = torch.zeros(starts[-1], VOCABULARY_SIZE, requires_grad=True)
            loss, count = tl.losses.forward_kl(logits, targets)
            loss.backward()
            assert logits.grad is not None
            assert bool(logits.grad.isfinite().all())
            assert not bool(logits.grad[bad].any())
            assert float(count) == len(rows[0]) - 1 + len(rows[2]) - 1
        good = [rows[0], rows[2]]
        with session.score(rows, bad_rows="mask").result() as leased:
            first, last = leased.columns["topk_ids"][:8], leased.columns["topk_ids"][-1:]
            with session.score(good).result() as alone:
                assert torch.equal(torch.cat([first, last]), alone.columns["topk_ids"])
                assert_right(alone, good)
            del first, last


# R19: 152,064 columns in the teacher's head, 151,936 in the student's

STUDENT_SIZE, TEACHER_SIZE = 151_936, 152_064


@pytest.fixture(scope="module")
def wide() -> WideTeacher:
    return WideTeacher(vocabulary_size=TEACHER_SIZE, head_rows=TEACHER_SIZE)


@pytest.fixture(scope="module")
def wide_client(tmp_path_factory: pytest.TempPathFactory, wide: WideTeacher) -> Iterator[tl.Client]:
    folder = tmp_path_factory.mktemp("wide")
    with (
        embedded_server(folder, pool_bytes=1 << 20, engine=wide) as server,
        tl.connect(server.address) as client,
    ):
        yield client


def test_r19_another_vocabulary_size_is_refused_with_both_and_the_way_out(
    wide_client: tl.Client,
) -> None:
    profile = a_profile(vocabulary_size=STUDENT_SIZE)
    violation = assert_refused(wide_client, profile, "vocab_mismatch")
    assert str(STUDENT_SIZE) in violation.message
    assert str(TEACHER_SIZE) in violation.message
    assert "VocabularyPolicy.TRUNCATE" in violation.message


def test_r19_truncation_is_the_dense_answer_without_the_columns_dropped(
    wide_client: tl.Client, wide: WideTeacher
) -> None:
    row = [0, 5, STUDENT_SIZE - 1]
    dense = torch.stack([wide.of(token) for token in row]).double()
    assert dense.argmax(1).tolist() == [BEST_COLUMN] * 3  # what is dropped matters
    kept = dense[:, :STUDENT_SIZE].log_softmax(1)
    profile = a_profile(
        top_k=64,
        vocabulary_size=STUDENT_SIZE,
        vocabulary_policy=tl.VocabularyPolicy.TRUNCATE,
        value_type=tl.ElementType.FLOAT32,
    )
    with wide_client.open_session(profile) as session:
        with session.score([row]).result() as leased:
            ids = leased.columns["topk_ids"].long()
            assert int(ids.max()) < STUDENT_SIZE
            best = kept.sort(dim=1, descending=True, stable=True)
            assert torch.equal(ids, best.indices[:, :64])
            assert_near(leased.columns["topk_logprobs"], best.values[:, :64], (1e-5, 1e-5))
            tail = best.values[:, 64:].logsumexp(1, keepdim=True)
            assert_near(leased.columns["log_tail"], tail, (1e-5, 1e-5))
            following = torch.tensor([kept[0, row[1]], kept[1, row[2]], 0.0]).double()
            assert_near(leased.columns["actual_logprob"], following, (1e-5, 1e-5))
            del ids


def test_r19_an_id_that_the_student_lacks_cannot_be_sent(wide_client: tl.Client) -> None:
    profile = a_profile(
        vocabulary_size=STUDENT_SIZE, vocabulary_policy=tl.VocabularyPolicy.TRUNCATE
    )
    with wide_client.open_session(profile) as session:
        with pytest.raises(PayloadInvalidError, match=str(BEST_COLUMN)):
            session.score([[BEST_COLUMN]])


def test_r19_a_student_with_more_columns_than_the_teacher_gets_the_teachers(
    tried: Tried,
) -> None:
    profile = a_profile(
        top_k=8,
        vocabulary_size=VOCABULARY_SIZE + 100,
        vocabulary_policy=tl.VocabularyPolicy.TRUNCATE,
    )
    with tried.client.open_session(profile) as session:
        assert session.terms.vocabulary_size == VOCABULARY_SIZE
        with session.score(RAGGED).result() as leased:
            assert_right(leased, RAGGED)


# R26: as many ids on both sides, and other tokens

TOKENS = {f"token{number}": number for number in range(100)}


def test_r26_a_tokenizer_with_its_ids_permuted_is_refused_with_both_fingerprints(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    own = tokenizer_fingerprint(vocabulary=TOKENS, added_tokens={})
    permuted = {token: (number + 1) % 100 for token, number in TOKENS.items()}
    other = tokenizer_fingerprint(vocabulary=permuted, added_tokens={})
    teacher = TriedTeacher(tokenizer_fingerprint=own)
    folder = tmp_path_factory.mktemp("tokens")
    with (
        embedded_server(folder, pool_bytes=1 << 20, engine=teacher) as server,
        tl.connect(server.address) as client,
    ):
        profile = a_profile(tokenizer_fingerprint=other)
        violation = assert_refused(client, profile, "tokenizer_mismatch")
        assert own in violation.message
        assert other in violation.message
        with client.open_session(a_profile(tokenizer_fingerprint=own)) as session:
            assert {c.name: c.verdict for c in session.checks}["tokenizer"] is tl.Verdict.PASSED


def test_r26_a_tokenizer_that_is_not_said_is_unchecked_and_not_passed(tried: Tried) -> None:
    with tried.client.open_session(a_profile()) as session:
        verdicts = {check.name: check.verdict for check in session.checks}
        assert verdicts["tokenizer"] is tl.Verdict.UNCHECKED
    with tried.client.open_session(a_profile(tokenizer_fingerprint=FINGERPRINT)) as session:
        verdicts = {check.name: check.verdict for check in session.checks}
        assert verdicts["tokenizer"] is tl.Verdict.PASSED


# R35: the log-probability of the token that came, and errors that are none


def test_r35_a_token_outside_the_k_ids_has_its_own_log_probability(tried: Tried) -> None:
    with tried.client.open_session(a_profile(top_k=1)) as session:
        with session.score(RAGGED).result() as leased:
            assert_right(leased, RAGGED)
            following = torch.tensor(RAGGED[0][1:])
            ids = leased.columns["topk_ids"][: len(following), 0]
            assert not bool((ids == following).any())
            actual = leased.targets.actual_logprob
            assert actual is not None
            assert bool((actual[: len(following)] < 0).all())
            del ids, actual


@pytest.mark.parametrize("bad_rows", ["reject", "mask"])
def test_r35_a_teacher_that_fails_is_an_error_and_never_data(tried: Tried, bad_rows: str) -> None:
    rows = rows_with(RAISING_TOKEN)
    with spoilt(tried, WAYS[-1]) as session:
        future = session.score(rows, bad_rows=bad_rows)  # type: ignore[arg-type]
        with pytest.raises(EngineError) as caught:
            future.result()
        assert ENGINES_OWN_WORDS not in str(caught.value)
        assert caught.value.facts["rows"] == len(rows)


def test_r35_a_neighbour_of_a_request_that_fails_gets_its_own_answer(tried: Tried) -> None:
    with spoilt(tried, WAYS[-1]) as session:
        tried.teacher.gate.clear()
        futures = [session.score(rows) for rows in (RAGGED, rows_with(RAISING_TOKEN), RAGGED)]
        tried.teacher.gate.set()
        for future in (futures[0], futures[2]):
            with future.result() as leased:
                assert_right(leased, RAGGED)
        with pytest.raises(EngineError):
            futures[1].result()


# R50: K of the whole vocabulary, and beyond; the K in between are the transport suite's


@pytest.mark.parametrize("size", [1, 2, 10])
def test_r50_k_may_be_the_whole_vocabulary_and_then_nothing_is_left(
    tried: Tried, size: int
) -> None:
    profile = a_profile(
        top_k=size,
        vocabulary_size=size,
        vocabulary_policy=tl.VocabularyPolicy.TRUNCATE,
        transports=(Transport.STREAM,),
        value_type=tl.ElementType.FLOAT32,
    )
    rows = [[0] * 3]
    with tried.client.open_session(profile) as session:
        with session.score(rows).result() as leased:
            assert_right(leased, rows, vocabulary_size=size)
            assert bool((leased.columns["log_tail"] == -math.inf).all())
            total = leased.targets.topk_logprobs.exp().sum(1)
            assert_near(total, torch.ones(3).double(), (0.0, 1e-6))


@pytest.mark.parametrize("size", [1, 2, 10])
def test_r50_k_beyond_the_vocabulary_is_refused_with_both_numbers(tried: Tried, size: int) -> None:
    profile = a_profile(
        top_k=size + 1, vocabulary_size=size, vocabulary_policy=tl.VocabularyPolicy.TRUNCATE
    )
    violation = assert_refused(tried.client, profile, "top_k_too_large")
    assert violation.facts["top_k"] == size + 1
    assert violation.facts["vocabulary_size"] == size
