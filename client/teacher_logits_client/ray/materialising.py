"""The materialised way: the driver gathers the payloads, puts rows in order, and cuts anew.

What a student rank is given is the same as on the deferred way: one flat payload, of its rows, in
its order. Rows are moved one by one: no [N,S,K] is ever flattened or concatenated whole.

Rows of another length than the student's batch (``sequence_length``; else the longest payload) are
padded on the right with zeros, or cut, and only where the rows' ``lengths`` say that nothing but
padding is added or lost: what lies behind a row's length must be masked, as everywhere. Otherwise
they are refused.

Costs, beside the payloads in the object store: one rank's payload at a time in the driver.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.ray.descriptions import (
    PayloadDescription,
    RowTokens,
    lay_out_columns,
)
from teacher_logits_client.ray.fetching import fetch, typed_errors
from teacher_logits_client.ray.flat import FlatPayload, column_views
from teacher_logits_client.ray.opening import open_payload
from teacher_logits_client.ray.slab_references import SlabReference

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from teacher_logits.layout import ElementType
    from teacher_logits_client.ray.agreement import Agreement
    from teacher_logits_client.ray.rooms import DeferredPayload


def materialise(
    payloads: Sequence[DeferredPayload], agreement: Agreement, *, step: int, timeout: float
) -> tuple[tuple[object, ...], tuple[PayloadDescription, ...]]:
    """Return a reference to each student rank's payload, and what it is.

    Raises:
        PayloadInvalidError: payloads differ in K or type, or in length beyond padding.
        DeadlinePassedError, ProducerLostError, ObjectLostError, PoolFullError: see ``fetching``.
    """
    import ray

    sources = [each if isinstance(each.source, SlabReference) else each.source for each in payloads]
    what = f"the payloads of step {step}"
    flats = [open_payload(each) for each in fetch(sources, timeout=timeout, what=what)]
    specs = _specs(flats, agreement)
    gathered = Gathered(flats)
    references: list[object] = []
    descriptions = []
    for rank, rows in enumerate(agreement.student_rows):
        flat = gathered.cut(rows, specs, step=step, rank=rank)
        with typed_errors(f"a payload of {flat.buffer.nbytes} bytes put for student rank {rank}"):
            references.append(ray.put(flat))
        descriptions.append(flat.description)
    return tuple(references), tuple(descriptions)


class Gathered:
    """Every row of the step by its global index: where it lies."""

    def __init__(self, flats: Sequence[FlatPayload]) -> None:
        self._flats = flats
        self._views = [flat.views() for flat in flats]
        self._places = {
            row: (at, place)
            for at, flat in enumerate(flats)
            for place, row in enumerate(flat.description.rows)
        }

    def cut(
        self,
        rows: tuple[int, ...],
        specs: Sequence[tuple[str, ElementType, tuple[int, int]]],
        *,
        step: int,
        rank: int,
    ) -> FlatPayload:
        """Return one student rank's payload; ``specs``: name, type and (S, K) of its columns."""
        columns = lay_out_columns(
            (name, kind, (len(rows), *of_row)) for name, kind, of_row in specs
        )
        described = PayloadDescription(
            step=step,
            data_parallel_rank=rank,
            rows=rows,
            columns=columns,
            id_range=self._id_range(rows),
            tokens=self._tokens(rows, specs[0][2][0]),
        )
        flat = FlatPayload(
            description=described, buffer=np.empty(described.size_bytes, dtype=np.uint8)
        )
        for name, target in column_views(flat.buffer, columns).items():
            for place, row in enumerate(rows):
                at, source = self._places[row]
                _copy_row(self._views[at][name][source], target[place])
        return flat

    def _id_range(self, rows: tuple[int, ...]) -> tuple[int, int] | None:
        ranges = [self._flats[at].description.id_range for at in self._sources(rows)]
        known = [each for each in ranges if each is not None]
        if len(known) < len(ranges):
            return None
        # Padding is id 0.
        return min(0, *(first for first, _ in known)), max(last for _, last in known)

    def _tokens(self, rows: tuple[int, ...], length: int) -> RowTokens | None:
        """Return what the rows' teachers said of them; None where one said nothing, or too much."""
        digests, lengths = [], []
        for row in rows:
            at, place = self._places[row]
            told = self._flats[at].description
            if told.tokens is None or (told.tokens.lengths is None and told.shape[1] != length):
                return None
            digests.append(told.tokens.digests[place])
            if told.tokens.lengths is not None:
                lengths.append(told.tokens.lengths[place])
        known = tuple(lengths) if len(lengths) == len(rows) else None
        return RowTokens(digests=tuple(digests), lengths=known) if known or not lengths else None

    def _sources(self, rows: tuple[int, ...]) -> set[int]:
        return {self._places[row][0] for row in rows}


def _copy_row(source: torch.Tensor, target: torch.Tensor) -> None:
    both = min(source.shape[0], target.shape[0])
    target[:both].copy_(source[:both])
    target[both:] = 0


def _specs(
    flats: Sequence[FlatPayload], agreement: Agreement
) -> list[tuple[str, ElementType, tuple[int, int]]]:
    """Return name, type and (S, K) of the columns that every student rank gets."""
    kinds = {
        tuple((each.name, each.element_type, each.shape[2]) for each in flat.description.columns)
        for flat in flats
    }
    if len(kinds) > 1:
        raise PayloadInvalidError(
            f"payloads of one step differ in type or K: {sorted(map(str, kinds))}",
            facts={"kinds": len(kinds)},
        )
    (columns,) = kinds
    length = agreement.plan.sequence_length
    if length is None:
        length = max(flat.description.shape[1] for flat in flats)
    for flat in flats:
        _check_padding(flat.description, length, agreement)
    return [(name, kind, (length, k)) for name, kind, k in columns]


def _check_padding(told: PayloadDescription, length: int, agreement: Agreement) -> None:
    """Let a payload pass that loses no position, nor gains one that a row has."""
    has = told.shape[1]
    if has == length:
        return
    lengths = agreement.plan.lengths
    longest = math.inf if lengths is None else max(int(lengths[row]) for row in told.rows)
    if longest > min(has, length):
        raise PayloadInvalidError(
            f"the payload of teacher rank {told.data_parallel_rank} has {has} positions a row and "
            f"{length} are wanted, of rows of up to "
            f"{'unknown length' if lengths is None else longest}: pad or cut behind the rows' "
            "lengths alone, and give those in the plan",
            facts={"has": has, "wanted": length, "longest_row": str(longest)},
        )
