"""Publishes and reads 256 MiB, where /dev/shm has less. A test runs it by path; it is none."""

import os
import sys
from pathlib import Path

import torch

import teacher_logits_client as tl
from teacher_logits.selection import select_top_k

MIB = 1 << 20
TOP_K, VOCABULARY_SIZE, ROWS, TOKENS = 1024, 1500, 11, 4000


def main() -> None:
    """Publish a step of one payload, and read it."""
    torch.set_num_threads(1)
    grid = tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=1)
    teacher = tl.TeacherProfile(
        teacher_id="wide",
        vocabulary_size=VOCABULARY_SIZE,
        head_rows=VOCABULARY_SIZE,
        top_k=TOP_K,
        max_row_tokens=TOKENS,
        batch_grid=grid,
        temperatures=(1.0,),
    )
    student = tl.StudentProfile(batch_grid=grid, teacher_id="wide", top_k=TOP_K)
    shm = os.statvfs("/dev/shm")
    assert shm.f_blocks * shm.f_frsize <= 64 * MIB
    one = select_top_k(torch.arange(VOCABULARY_SIZE).unsqueeze(0) / 300, k=TOP_K)
    with (
        tl.testing.serve() as server,
        tl.connect(server.address) as client,
        client.open_publisher(teacher, slab_size_bytes=300 * MIB) as publisher,
        client.open_session(student) as session,
    ):
        with publisher.reserve(0, lengths=[TOKENS] * ROWS) as draft:
            draft.write(
                topk_ids=one.topk_ids.expand(ROWS * TOKENS, -1),
                topk_logprobs=one.topk_logprobs.expand(ROWS * TOKENS, -1),
                log_tail=one.log_tail.expand(ROWS * TOKENS, -1),
                logsumexp=one.logsumexp.expand(ROWS * TOKENS, -1),
                actual_logprob=torch.zeros(ROWS * TOKENS),
            )
        with session.acquire(step=0) as batch:
            assert set(batch.transports.values()) == {tl.Transport.SHARED_MEMORY}
            size = sum(each.nbytes for each in batch.columns.values())
            assert bool((batch.columns["topk_ids"] == one.topk_ids).all())
    assert not list(Path("/dev/shm").iterdir())
    sys.stdout.write(f"{size // MIB} MiB\n")


if __name__ == "__main__":
    main()
