"""Zigzag: which positions of a row a context-parallel rank holds, where its ranks share the work.

A causal row costs more towards its end. So it is cut into 2n parts of equal length, and rank r
of n holds part r and part 2n-1-r, as NeMo RL and Megatron do:

    positions   | 0 | 1 | 2 | 3 | 4 | 5 |        rank 0 holds parts 0 and 5, rank 1 parts 1 and 4,
    n = 3       | r0  r1  r2  r2  r1  r0 |       rank 2 parts 2 and 3

A teacher that is cut so undoes it before anything is shifted, selected or published: positions
here count from a row's first token.
"""

from __future__ import annotations

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_size, is_whole


def zigzag_positions(length: int, *, rank: int, size: int) -> tuple[range, ...]:
    """Return the runs of positions that a rank holds of a row of ``length``, in their order.

    One run for a single rank, which holds all of them.

    Raises:
        PayloadInvalidError: ``length`` is no multiple of twice ``size``, which rows are padded
            to, or ``rank`` is none of ``size`` ranks.
    """
    if not is_size(size) or not is_whole(rank) or not 0 <= rank < size:
        raise PayloadInvalidError(
            f"context-parallel rank {rank} of {size}: give a rank from 0 on, below their number",
            facts={"rank": str(rank), "size": str(size)},
        )
    if not is_whole(length) or length < 0 or (size > 1 and length % (2 * size)):
        raise PayloadInvalidError(
            f"a row of {length} positions cannot be cut into {2 * size} parts of equal length: pad "
            f"it to a multiple of {2 * size}",
            facts={"length": str(length), "parts": 2 * size},
        )
    if size == 1:
        return (range(length),)
    part = length // (2 * size)
    return tuple(range(at * part, (at + 1) * part) for at in (rank, 2 * size - 1 - rank))
