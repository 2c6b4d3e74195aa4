"""What a real server hands out, as fields of a store: scored, registered, whole and in pieces."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.publishing.a_publisher import (
    VOCABULARY,
    WIDTH,
    K,
    a_grid,
    a_student,
    a_teacher,
    flat,
    some_rows,
)

import teacher_logits_client as tl
from teacher_logits.errors import LeaseLostError
from teacher_logits.layout import ColumnKind
from teacher_logits.profiles import PUBLISHED_COLUMNS
from teacher_logits_client.data_plane.fields import ABSENT_ID, TopKForm
from teacher_logits_client.data_plane.padded import pad_jagged
from teacher_logits_client.data_plane.teacher_fields import teacher_fields
from teacher_logits_client.trainers.nemo_rl import INDICES, LOGITS, TAIL

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 30.0
FORM = TopKForm(k=K)
names = (f"fields-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def client() -> Iterator[tl.Client]:
    with tl.testing.serve(pool_size="4MiB") as server, tl.connect(server.address) as client:
        yield client


@pytest.fixture
def session(client: tl.Client) -> Iterator[tl.Session]:
    profile = tl.StudentProfile(batch_grid=a_grid(), top_k=K, value_type=tl.ElementType.FLOAT32)
    with client.open_session(profile) as session:
        yield session


def test_scored_rows_outlive_their_lease(session: tl.Session) -> None:
    ids, lengths, _ = some_rows(0)

    with session.score(ids, lengths=lengths).result(timeout=LONG) as payload:
        fields = teacher_fields(payload, lengths, FORM)
        wanted = payload.targets.clone()

    assert torch.equal(fields[INDICES].values(), wanted.topk_ids.long())
    assert torch.equal(fields[LOGITS].values(), wanted.topk_logprobs)
    assert torch.equal(fields[TAIL].values(), wanted.log_tail)
    with pytest.raises(LeaseLostError):
        teacher_fields(payload, lengths, FORM)


def test_windows_leave_the_rest_of_a_row_without_entries(session: tl.Session) -> None:
    ids, lengths, _ = some_rows(1)
    windows = [(1, 1), (0, 2), (1, 1), (0, 1)]

    with session.score(ids, lengths=lengths, windows=windows).result(timeout=LONG) as payload:
        padded = pad_jagged(teacher_fields(payload, lengths, FORM), lengths=lengths)

    there = (padded.fields[INDICES][..., 0] != ABSENT_ID).nonzero().tolist()
    assert there == [[0, 1], [1, 0], [1, 1], [2, 1], [3, 0]]


def test_a_rank_of_a_registered_step_has_its_rows_whole_and_in_micro_batches(
    client: tl.Client,
) -> None:
    """Two real rows of four: the second micro batch is padding alone. Raw logits besides."""
    ids, lengths, logits = some_rows(2, rows=2)
    name, raw = next(names), TopKForm(k=K, raw_logits=True, with_tail=False)
    student = a_student(name, columns=(ColumnKind.TOPK_LOGITS,), batch_grid=a_grid(micro=2))
    teacher = a_teacher(name, columns=PUBLISHED_COLUMNS)
    with client.open_publisher(teacher) as publisher, client.open_session(student) as session:
        with publisher.reserve(0, input_ids=ids, lengths=lengths, real_rows=2) as draft:
            tl.select_top_k(logits, out=draft)
        tokens = [*lengths.tolist(), 0, 0]
        with session.acquire(step=0, input_ids=ids, lengths=lengths, timeout=LONG) as batch:
            whole = teacher_fields(batch, tokens, FORM)
            hot = teacher_fields(batch, tokens, FORM, temperature=2.0)
            as_logits = teacher_fields(batch, tokens, raw)
            parts = [
                teacher_fields(micro, tokens[2 * at : 2 * at + 2], FORM)
                for at, micro in enumerate(batch.micro_batches())
            ]

    own = flat(logits, lengths)[:, :VOCABULARY]
    kept = whole[INDICES].values()
    assert [len(row) for row in whole[LOGITS].unbind()] == tokens
    assert torch.allclose(whole[LOGITS].values(), own.log_softmax(1).gather(1, kept), atol=1e-5)
    assert torch.allclose(hot[LOGITS].values(), (own / 2).log_softmax(1).gather(1, kept), atol=1e-5)
    assert torch.equal(as_logits[LOGITS].values(), own.gather(1, kept))
    assert torch.equal(parts[0][LOGITS].values(), whole[LOGITS].values())
    assert parts[1][LOGITS].values().shape == (0, K)
    assert max(tokens) == WIDTH
