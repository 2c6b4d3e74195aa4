"""A rank's turn at a step's rows: read them, run, write back, and answer scalars.

    driver   ->  RowMeta of this rank's rows          no tensor goes to a worker through the driver
    store    ->  the fields that are named, padded to the step's one width
    run      ->  a mapping of the promised fields
    store    <-  their rows, without padding, by one writer of the replica
    driver   <-  the writer's WriteReport as scalars; None from the others

Rows are read by their keys, which moves no cursor; a field that is not named is not fetched. A
plan that the driver made comes along; where rows are packed or batched and none came, that is an
error, since ranks that made their own would not meet in their collectives.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.data_plane.fields import PAD_VALUES, TOKEN_ALIGNED
from teacher_logits_client.data_plane.padded import Padded, pad_jagged
from teacher_logits_client.data_plane.row_store import DEFAULT_TIMEOUT_SECONDS, RowStore
from teacher_logits_client.data_plane.write_back import check_answer, pack_answer, report_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from teacher_logits_client.data_plane.fields import FieldSpec
    from teacher_logits_client.data_plane.row_meta import RowMeta


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRows:
    """What a rank runs on: its rows, their fields padded, and the driver's plan for them.

    ``fields``, ``lengths`` and ``mask`` are as in ``padded.Padded``.
    """

    meta: RowMeta
    fields: Mapping[str, torch.Tensor]
    lengths: torch.Tensor
    mask: torch.Tensor
    plan: Mapping[str, object] | None


class Replica(Protocol):
    """The ranks that compute the same rows together: tensor, context and pipeline parallel."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the one that writes."""

    def share(self, read: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return what ``read`` gives: read by each rank itself, or by one and handed on."""


@dataclass(frozen=True, kw_only=True)
class IndependentReads:
    """A replica whose ranks each read for themselves."""

    is_leader: bool = True

    def share(self, read: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Read."""
        return read()


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How rows are read and written back, the same at every rank and step.

    Args:
        select_fields: the fields to read; there is no reading of all.
        writes: the fields that ``run`` answers with, in their form.
        token_aligned, pad_values: of what is read; see ``padded.pad_jagged``.
        needs_plan: rows are packed, or batched dynamically, so that a plan has to be there.
        padded_to: how wide the answer is where it has more padding than what was read
            (sequence parallelism). Its rows' lengths are cut out of that.
        timeout: seconds that a read, and a write, may take.

    Raises:
        PayloadInvalidError: nothing is to be read, or nothing to be written.
    """

    select_fields: Sequence[str]
    writes: Sequence[FieldSpec]
    token_aligned: Collection[str] = TOKEN_ALIGNED
    pad_values: Mapping[str, float] = field(default_factory=lambda: PAD_VALUES)
    needs_plan: bool = False
    padded_to: int | None = None
    timeout: float = DEFAULT_TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        if isinstance(self.select_fields, str) or not self.select_fields or not self.writes:
            raise PayloadInvalidError(
                f"select_fields is {self.select_fields!r}, and {len(self.writes)} fields are to be "
                "written: name each field that is read, in a list, and at least one to write",
                facts={"writes": len(self.writes)},
            )


def run_presharded(
    store: RowStore,
    meta: RowMeta,
    run: Callable[[RankRows], Mapping[str, torch.Tensor]],
    turn: Turn,
    *,
    replica: Replica | None = None,
) -> dict[str, int | float] | None:
    """Take a rank's turn; return the writer's scalars, and None from ranks that do not write.

    Args:
        meta: this rank's rows.
        run: makes the promised fields of them: nested, or padded as what was read. Every rank
            of a replica runs it; the leader's answer is written.
        replica: who else computes these rows; nobody by default.

    Raises:
        PayloadInvalidError: no plan came where one is needed, a field's rows are not as long as
            the metadata says, or the answer is not what was promised. Nothing was written then.
        RowsMissingError, PayloadConflictError, DeadlinePassedError, TransportFailure: see
            ``row_store.RowStore``.
    """
    if turn.needs_plan and meta.plan is None:
        raise PayloadInvalidError(
            f"{len(meta)} rows of partition {meta.partition_id} are packed or batched, and no plan "
            "came with them: the driver makes one for all ranks and ships it (RowMeta.plan)",
            facts={"rows": len(meta), "partition_id": meta.partition_id},
        )
    replica = replica or IndependentReads()
    read = replica.share(lambda: store.read(meta, turn.select_fields, timeout=turn.timeout))
    padded = _padded(read, meta, turn)
    rows = RankRows(
        meta=meta,
        fields=padded.fields,
        lengths=padded.lengths,
        mask=padded.mask,
        plan=meta.plan,
    )
    answer = run(rows)
    if not replica.is_leader:
        return None
    check_answer(answer, meta, turn.writes)
    return _write(store, meta, answer, turn, width=padded.mask.shape[1])


def _padded(read: Mapping[str, torch.Tensor], meta: RowMeta, turn: Turn) -> Padded:
    return pad_jagged(
        read,
        lengths=meta.sequence_lengths,
        token_aligned=turn.token_aligned,
        pad_values=turn.pad_values,
        pad_to_seqlen=meta.pad_to_seqlen,
    )


def _write(
    store: RowStore,
    meta: RowMeta,
    answer: Mapping[str, torch.Tensor],
    turn: Turn,
    *,
    width: int,
) -> dict[str, int | float]:
    begun = time.monotonic()
    packed = pack_answer(answer, meta, turn.writes, padded_to=turn.padded_to or width)
    store.add_fields(meta, packed, timeout=turn.timeout)
    taken_ms = (time.monotonic() - begun) * 1e3
    return replace(report_of(answer, packed, meta, turn.writes), write_ms=taken_ms).scalars()
