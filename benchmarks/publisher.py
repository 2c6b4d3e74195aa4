"""A publisher in a process of its own, which writes and seals what it is told to.

    python -m benchmarks.publisher ADDRESS TOKENS

is all of the teacher `teacher_of(TOKENS)`: a step has ROWS rows of so many tokens. It says its
`transport` once it is there, and then does what its standard input says, a line each:

    publish STEP    reserves, writes and seals; says `size_bytes` of the payload
    write STEP      reserves, writes and checks; says the same
    seal            seals that, a moment later; says when, in nanoseconds of the machine's clock

What is written is nothing that a model said, but holds together.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

import torch
from benchmarks.report import write_line

import teacher_logits_client as tl

if TYPE_CHECKING:
    from teacher_logits_client import Draft, Publisher

ROWS = 8
TOP_K = 64
VOCABULARY = 128
A_MOMENT_SECONDS = 0.005
"""Until a seal, so that whoever is to wait for it does."""

_BYTES_A_POSITION = 6 * TOP_K + 12
_STEPS_HELD = 3


def teacher_of(tokens: int) -> tl.TeacherProfile:
    """Return the profile of a teacher of rows of so many tokens."""
    return tl.TeacherProfile(
        teacher_id=f"tokens-{tokens}",
        vocabulary_size=VOCABULARY,
        head_rows=VOCABULARY,
        top_k=TOP_K,
        max_row_tokens=tokens,
        batch_grid=tl.BatchGrid(global_batch_size=ROWS, data_parallel_size=1, micro_batch_size=1),
    )


def tokens_of(size_bytes: int) -> int:
    """Return the tokens a row of a payload of about so many bytes, at least 2."""
    return max(2, size_bytes // (_BYTES_A_POSITION * ROWS))


def serve(argv: list[str]) -> int:
    """Publish what is asked for, until standard input ends."""
    address, tokens = argv[0], int(argv[1])
    torch.set_num_threads(1)
    size_bytes = tokens * ROWS * _BYTES_A_POSITION + (1 << 20)
    with (
        tl.connect(address) as client,
        client.open_publisher(
            teacher_of(tokens),
            pool_size_bytes=_STEPS_HELD * size_bytes,
            slab_size_bytes=_STEPS_HELD * size_bytes,
        ) as publisher,
    ):
        written: Draft | None = None
        write_line({"transport": publisher.transport.value})
        for line in sys.stdin:
            command, *numbers = line.split()
            if command == "seal" and written is not None:
                write_line(_seal(written))
                written = None
                continue
            draft = written = _write(publisher, int(numbers[0]), tokens)
            if command == "publish":
                draft.seal()
                written = None
            else:
                draft.check()
            write_line({"size_bytes": draft.payload.size_bytes})
    return 0


def _write(publisher: Publisher, step: int, tokens: int) -> Draft:
    """Fill a payload as ``select_top_k`` would."""
    draft = publisher.reserve(step, lengths=[tokens] * ROWS)
    selection = draft.selection
    selection.topk_ids.copy_(torch.arange(TOP_K).expand_as(selection.topk_ids))
    selection.topk_logprobs.fill_(-math.log(VOCABULARY))
    selection.log_tail.fill_(math.log1p(-TOP_K / VOCABULARY))
    selection.logsumexp.fill_(math.log(VOCABULARY))
    if selection.actual_logprob is not None:
        selection.actual_logprob.fill_(-math.log(VOCABULARY))
    selection.status.zero_()
    return draft


def _seal(draft: Draft) -> dict[str, int]:
    time.sleep(A_MOMENT_SECONDS)
    called = time.monotonic_ns()
    draft.seal()
    return {"called_ns": called, "sealed_ns": time.monotonic_ns()}


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
