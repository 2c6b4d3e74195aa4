"""What tests of steps share: eight rows, of which rank 1 of two reads the last four."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tests.client.losses.shards import Ids, K, Shard, logits_of, shards_of, some_ids
from tests.client.steps.step_servers import (
    LONG,
    Broker,
    a_grant,
    a_profile,
    local_session,
)

import teacher_logits_client as tl
from teacher_logits.selection import select_top_k
from teacher_logits.terms import LeaseTerms
from teacher_logits_client.payloads.batch import Batch

IDS = some_ids(8)
RANK_1 = range(4, 8)
"""What rank 1 of two reads of eight rows."""


def rank(number: int, **given: object) -> tl.StudentProfile:
    return a_profile(data_parallel_rank=number, **given)


def ready(
    broker: Broker,
    shards: Sequence[Shard],
    *,
    step: int = 7,
    real_rows: int = 8,
    rows: range = RANK_1,
    global_count: int | None = None,
) -> list[LeaseTerms]:
    """Send a step that is complete."""
    leases = [
        broker.lease(each)
        for each in shards
        if each.payload.first_row < min(rows.stop, real_rows)
        and each.payload.first_row + each.payload.row_count > rows.start
    ]
    broker.send(a_grant(step, leases, real_rows=real_rows, global_count=global_count))
    return leases


@contextmanager
def rank_1(folder: Path, sizes: Sequence[int] = (8,), **given: object) -> Iterator[Batch]:
    """Rank 1's batch of a step that was sent ahead."""
    with local_session(folder, profile=rank(1)) as (session, broker):
        ready(broker, shards_of(IDS, sizes), **given)  # type: ignore[arg-type]
        with session.acquire(step=7, input_ids=IDS[4:], timeout=LONG) as batch:
            yield batch


def expected(ids: Ids) -> torch.Tensor:
    """The best ids at each position."""
    return torch.cat([select_top_k(logits_of(row), k=K).topk_ids for row in ids])
