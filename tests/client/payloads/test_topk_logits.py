"""Raw logits beside the log-probabilities, from publishers that promise them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.publishing.a_publisher import (
    VOCABULARY,
    K,
    a_grid,
    a_student,
    a_teacher,
    expected,
    flat,
    some_rows,
)

import teacher_logits_client as tl
from teacher_logits.errors import PayloadInvalidError, SessionRefusedError
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.profiles import PUBLISHED_COLUMNS, SCORED_COLUMNS
from teacher_logits.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = 30.0
LOGITS = (ColumnKind.TOPK_LOGITS,)
names = (f"raw-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def client() -> Iterator[tl.Client]:
    with tl.testing.serve(pool_size="4MiB") as server, tl.connect(server.address) as client:
        yield client


def raw(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The logits of the ids that were kept."""
    return logits.gather(1, ids.long())


@pytest.mark.parametrize("value_type", list(ElementType)[:3])
@pytest.mark.parametrize("way", ["shared_memory", "stream"])
def test_are_those_that_the_teacher_had(
    client: tl.Client, value_type: ElementType, way: str
) -> None:
    ids, lengths, logits = some_rows(0)
    name = next(names)
    grid = a_grid(2, rows=4)
    teacher = a_teacher(name, columns=PUBLISHED_COLUMNS, value_type=value_type)
    student = a_student(name, columns=LOGITS, value_type=value_type, batch_grid=grid)
    with (
        client.open_publisher(teacher, transports=(way,), pool_size_bytes=1 << 18) as publisher,
        client.open_session(student) as session,
    ):
        with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
            tl.select_top_k(logits, out=draft)
            written = draft.columns["topk_logits"].clone()
        with session.acquire(step=0, input_ids=ids[:2], lengths=lengths[:2], timeout=LONG) as batch:
            found = batch.columns["topk_logits"].clone()
            kept = batch.columns["topk_ids"].clone()
            assert (batch.targets.topk_ids == kept).all()
    own = flat(logits, lengths)[: len(kept), :VOCABULARY]
    is_brain = value_type is ElementType.BFLOAT16
    assert found.dtype is (torch.bfloat16 if is_brain else torch.float32)
    assert torch.equal(found, written[: len(kept)])
    assert torch.equal(found, raw(kept, own).to(found.dtype))


def test_a_padding_rank_has_them_too(client: tl.Client) -> None:
    ids, lengths, logits = some_rows(1, rows=2)
    name = next(names)
    student = a_student(name, columns=LOGITS, batch_grid=a_grid(2), data_parallel_rank=1)
    with (
        client.open_publisher(a_teacher(name, columns=PUBLISHED_COLUMNS)) as publisher,
        client.open_session(student) as session,
    ):
        with publisher.reserve(0, input_ids=ids, lengths=lengths, real_rows=2) as draft:
            tl.select_top_k(logits, out=draft)
        with session.acquire(step=0, timeout=LONG) as batch:
            column = batch.columns["topk_logits"]
            assert (column.dtype, tuple(column.shape)) == (torch.float32, (0, K))
            assert set(batch.columns) == {kind.value for kind in PUBLISHED_COLUMNS}
            del column


class TestWrittenByHand:
    def draft(self, client: tl.Client, **changed: torch.Tensor) -> None:
        ids, lengths, logits = some_rows(2)
        kept = expected(ids, lengths, logits)
        assert isinstance(kept, Selection)
        columns = {
            name: getattr(kept, name)
            for name in ("topk_ids", "topk_logprobs", "log_tail", "logsumexp", "actual_logprob")
        }
        columns["topk_logits"] = raw(kept.topk_ids, flat(logits, lengths))
        profile = a_teacher(next(names), columns=PUBLISHED_COLUMNS)
        with client.open_publisher(profile) as publisher:
            with publisher.reserve(0, input_ids=ids, lengths=lengths) as draft:
                draft.write(**{**columns, **changed})
                if not changed:
                    draft.columns["topk_logits"]
        assert draft.stage == "sealed"

    def test_are_taken(self, client: tl.Client) -> None:
        self.draft(client)

    def test_are_held_against_the_order(self, client: tl.Client) -> None:
        ids, lengths, logits = some_rows(2)
        kept = expected(ids, lengths, logits)
        assert isinstance(kept, Selection)
        upside_down = raw(kept.topk_ids, flat(logits, lengths)).flip(1)
        with pytest.raises(PayloadInvalidError, match=r"logits .* not in falling order"):
            self.draft(client, topk_logits=upside_down)


def test_have_to_be_written_where_they_were_promised(client: tl.Client) -> None:
    ids, lengths, logits = some_rows(3)
    with client.open_publisher(a_teacher(next(names), columns=PUBLISHED_COLUMNS)) as publisher:
        draft = publisher.reserve(0, input_ids=ids, lengths=lengths)
        kept = vars(expected(ids, lengths, logits))
        draft.write(**{name: column for name, column in kept.items() if name != "status"})
        with pytest.raises(PayloadInvalidError, match="topk_logits was not written"):
            draft.seal()


def test_who_wants_them_of_a_teacher_that_has_none_is_refused(client: tl.Client) -> None:
    name = next(names)
    with client.open_publisher(a_teacher(name)):
        with pytest.raises(SessionRefusedError, match=r"column_unavailable.*topk_logits"):
            client.open_session(a_student(name, columns=LOGITS))


@pytest.mark.parametrize("kind", [ColumnKind.LOGITS, ColumnKind.HIDDEN_STATES])
def test_columns_of_later_releases_are_refused_by_name(client: tl.Client, kind: ColumnKind) -> None:
    profile = a_teacher(next(names), columns=(*SCORED_COLUMNS, kind))
    with pytest.raises(SessionRefusedError, match=f"column_unavailable.*{kind.value}"):
        client.open_publisher(profile)


def test_a_bad_row_has_none(client: tl.Client) -> None:
    ids, lengths, logits = some_rows(4)
    logits[1, 0, 0] = float("nan")
    name = next(names)
    with (
        client.open_publisher(a_teacher(name, columns=PUBLISHED_COLUMNS)) as publisher,
        client.open_session(a_student(name, columns=LOGITS)) as session,
    ):
        with publisher.reserve(0, input_ids=ids, lengths=lengths, bad_rows="mask") as draft:
            tl.select_top_k(logits, out=draft)
        with session.acquire(step=0, timeout=LONG) as batch:
            start, stop = lengths[0], lengths[0] + lengths[1]
            assert not batch.columns["topk_logits"][start:stop].any()
