"""Row order: which rows of the global batch each data-parallel rank holds, and in which order.

As NeMo RL cuts a batch, chunk by chunk (a chunk has ``batch_size`` rows, the whole if not said):

    contiguous   rank d of D holds the d-th part of each chunk
    packed       each chunk is packed (``bins``), and its bins are dealt out over the ranks in turn;
                 a rank holds the rows of its bins, in their order
    dynamic      each chunk is sorted by length and dealt out row by row; the ranks' micro batches
                 start at the same places, as large as the longest row of any of them allows

Pure: numbers in, numbers out. Promises that the ranks' rows tile the batch once. Refuses, by a rule
name each, what NeMo RL refuses: ``batch_not_multiple_of_shards``, ``total_not_multiple_of_batch``;
and: ``not_positive``, ``row_too_long``, ``too_few_rows``, ``lengths_missing``,
``algorithm_unknown``, ``not_whole``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from teacher_logits.errors import GridMismatchError, Violation
from teacher_logits.grid import check_sizes
from teacher_logits.layout import round_up
from teacher_logits_client.ray.bins import pack_rows
from teacher_logits_client.ray.given import as_violation, whole_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Dealt = list[list["MicroBatch"]]  # a chunk's, by rank; rows count from the chunk's first

ALGORITHM = "modified_first_fit_decreasing"


@dataclass(frozen=True, kw_only=True)
class SequencePacking:
    """How sequences are packed into micro batches of so many tokens.

    A row's length counts rounded up to ``pad_multiple``. The names of the algorithm and of the
    keys take part in whether two sides pack alike; no algorithm but the default is planned here.
    """

    max_tokens_per_micro_batch: int
    pad_multiple: int = 1
    algorithm: str = ALGORITHM
    input_key: str = "input_ids"
    input_lengths_key: str = "input_lengths"


@dataclass(frozen=True, kw_only=True)
class DynamicBatching:
    """Micro batches of so many tokens, padding included; lengths rounded up to ``length_round``."""

    max_tokens_per_micro_batch: int
    length_round: int = 1


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows of the global batch that go through a model at once, and how many tokens that is.

    ``tokens``: of all rows together where they are packed, else of the longest.
    """

    rows: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """What each rank holds.

    ``rows[d]`` are rank d's, in its order. ``micro_batches[d][c]`` are those of its part of chunk
    c, or none where the micro batch size alone says how it is cut.
    """

    rows: tuple[tuple[int, ...], ...]
    micro_batches: tuple[tuple[tuple[MicroBatch, ...], ...], ...] | None = None


def row_order(
    *,
    row_count: int,
    ranks: int,
    batch_size: int | None = None,
    lengths: Sequence[int] | None = None,
    batching: SequencePacking | DynamicBatching | None = None,
) -> RowOrder:
    """Return the order in which ``ranks`` hold ``row_count`` rows; ``lengths`` in tokens, by row.

    Raises:
        GridMismatchError: the rows cannot be cut so; ``violations`` says by which rule.
    """
    size = row_count if batch_size is None else batch_size
    with as_violation("not_whole"):
        tokens = None if lengths is None else list(whole_numbers(lengths, what="lengths"))
    _check(row_count, ranks, size, tokens, batching)
    if batching is None or tokens is None:
        part = size // ranks
        starts = range(0, row_count, size)
        held = [
            tuple(row for at in starts for row in range(at + d * part, at + (d + 1) * part))
            for d in range(ranks)
        ]
        return RowOrder(rows=tuple(held))
    deal = _dealer(batching, ranks)
    ranks_chunks: list[list[tuple[MicroBatch, ...]]] = [[] for _ in range(ranks)]
    for start in range(0, row_count, size):
        dealt = deal(tokens[start : start + size])
        for chunks, mine in zip(ranks_chunks, dealt, strict=True):
            chunks.append(tuple(_moved(each, start) for each in mine))
    return RowOrder(
        rows=tuple(
            tuple(row for chunk in chunks for each in chunk for row in each.rows)
            for chunks in ranks_chunks
        ),
        micro_batches=tuple(tuple(chunks) for chunks in ranks_chunks),
    )


def _dealer(
    batching: SequencePacking | DynamicBatching, ranks: int
) -> Callable[[list[int]], _Dealt]:
    if isinstance(batching, SequencePacking):
        return lambda lengths: _packed(lengths, batching, ranks)
    return lambda lengths: _dynamic(lengths, batching, ranks)


def _packed(lengths: list[int], packing: SequencePacking, ranks: int) -> _Dealt:
    sizes = [round_up(length, packing.pad_multiple) for length in lengths]
    bins = pack_rows(sizes, capacity=packing.max_tokens_per_micro_batch, multiple_of=ranks)
    made = [MicroBatch(rows=tuple(rows), tokens=sum(sizes[row] for row in rows)) for rows in bins]
    return [made[rank::ranks] for rank in range(ranks)]


def _dynamic(lengths: list[int], dynamic: DynamicBatching, ranks: int) -> _Dealt:
    rising = sorted(range(len(lengths)), key=lengths.__getitem__)
    sizes = [round_up(lengths[row], dynamic.length_round) for row in rising]
    # Rising: of those dealt out together, and of a micro batch, the last is the longest.
    longest = sizes[ranks - 1 :: ranks]
    starts, tokens = [0], longest[:1]
    for at in range(1, len(longest)):
        if longest[at] * (at - starts[-1] + 1) > dynamic.max_tokens_per_micro_batch:
            starts.append(at)
            tokens.append(longest[at])
        tokens[-1] = longest[at]
    ends = [*starts[1:], len(longest)]
    return [
        [
            MicroBatch(rows=tuple(rising[rank::ranks][start:end]), tokens=size)
            for start, end, size in zip(starts, ends, tokens, strict=True)
        ]
        for rank in range(ranks)
    ]


def _moved(batch: MicroBatch, start: int) -> MicroBatch:
    return MicroBatch(rows=tuple(start + row for row in batch.rows), tokens=batch.tokens)


def _check(
    row_count: int,
    ranks: int,
    size: int,
    lengths: Sequence[int] | None,
    batching: SequencePacking | DynamicBatching | None,
) -> None:
    sizes = {"row_count": row_count, "ranks": ranks, "batch_size": size}
    if isinstance(batching, SequencePacking):
        sizes["pad_multiple"] = batching.pad_multiple
    elif isinstance(batching, DynamicBatching):
        sizes["length_round"] = batching.length_round
    if batching is not None:
        sizes["max_tokens_per_micro_batch"] = batching.max_tokens_per_micro_batch
    if batching is not None and lengths is not None:
        bad = {f"lengths[{row}]": length for row, length in enumerate(lengths) if length < 1}
        sizes |= bad
    broken = check_sizes(sizes) or _check_cut(row_count, ranks, size)
    if batching is not None and (lengths is None or len(lengths) != row_count):
        given = 0 if lengths is None else len(lengths)
        message = f"{row_count} rows are batched by their lengths, of which {given} are given"
        facts = {"rows": row_count, "lengths": given}
        broken.append(Violation(rule="lengths_missing", message=message, facts=facts))
    if isinstance(batching, SequencePacking) and batching.algorithm != ALGORITHM:
        message = f"{batching.algorithm} is not planned here: give the rows of each rank yourself"
        named = {"algorithm": batching.algorithm}
        broken.append(Violation(rule="algorithm_unknown", message=message, facts=named))
    if broken:
        raise GridMismatchError(broken)


def _check_cut(row_count: int, ranks: int, size: int) -> list[Violation]:
    broken = []
    if row_count % size:
        message = f"{row_count} rows are no whole number of batches of {size}; give a multiple"
        facts = {"rows": row_count, "batch_size": size}
        broken.append(Violation(rule="total_not_multiple_of_batch", message=message, facts=facts))
    if size % ranks:
        message = f"a batch of {size} rows does not split over {ranks} ranks; give a multiple"
        facts = {"batch_size": size, "ranks": ranks}
        broken.append(Violation(rule="batch_not_multiple_of_shards", message=message, facts=facts))
    return broken
