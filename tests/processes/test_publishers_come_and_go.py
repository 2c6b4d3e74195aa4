"""A reader that outlives many publishers keeps nothing of those that are gone."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tests.client.publishing.a_publisher import a_student, a_teacher, some_rows

import teacher_logits_client as tl

PUBLISHERS = 20


def mapped_slabs() -> int:
    """Slabs that this process has mapped, of whomever."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:" in line and "slab" in line})


@pytest.mark.slow
def test_twenty_publishers_leave_a_reader_with_no_more_mappings_than_two() -> None:
    ids, lengths, logits = some_rows(0)
    counts: list[int] = []
    with (
        tl.testing.serve(pool_size="4MiB") as server,
        tl.connect(server.address) as client,
        tl.connect(server.address) as students,
    ):
        session: tl.Session | None = None
        for step in range(PUBLISHERS):
            with client.open_publisher(
                a_teacher("short-lived"), pool_size_bytes=1 << 18, slab_size_bytes=1 << 18
            ) as publisher:
                with publisher.reserve(step, input_ids=ids, lengths=lengths) as draft:
                    tl.select_top_k(logits, out=draft)
                del draft
                session = session or students.open_session(a_student("short-lived"))
            # What it sealed is read when it has gone, so that it cannot say that its slab has.
            with session.acquire(step=step, timeout=30) as batch:
                assert set(batch.transports.values()) == {tl.Transport.SHARED_MEMORY}
            assert session._returner.wait(30)
            counts.append(mapped_slabs())
    assert max(counts[1:]) <= counts[0] + 1
