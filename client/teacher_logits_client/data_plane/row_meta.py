"""Row metadata: which rows of a partition, and what is said of each, kept in step.

It is what travels between a driver and its workers in place of tensors. Whatever takes, drops or
joins rows does so to every list at once, so that a length or a tag is never another row's. A
width that all ranks pad to goes along; a packing plan does not, being of the rows that it was made
for: a rank that made one of its own would run another number of micro batches than its peers, and
their collectives would not meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_size, is_whole

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class RowMeta:
    """N rows of one partition, at least one.

    Args:
        partition_id: the partition that they lie in.
        sample_ids: their keys, each once, as minted by who first wrote them.
        sequence_lengths: tokens of each row.
        tags: what else is known of each row; none for rows without.
        pad_to_seqlen: the width that all ranks pad to; 0 where none was minted.
        plan: how these rows are packed or batched, made by the driver; None where they are not.

    Raises:
        PayloadInvalidError: lists of differing lengths, a key twice, a length that is none.
    """

    partition_id: str
    sample_ids: tuple[str, ...]
    sequence_lengths: tuple[int, ...]
    tags: tuple[Mapping[str, object], ...] = ()
    pad_to_seqlen: int = 0
    plan: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        ids, lengths = tuple(self.sample_ids), tuple(self.sequence_lengths)
        tags = tuple(self.tags) or (_NOTHING,) * len(ids)
        if not ids or not len(ids) == len(lengths) == len(tags):
            raise PayloadInvalidError(
                f"there are {len(ids)} sample ids, {len(lengths)} lengths and {len(tags)} tags: "
                "one of each for every row, and at least one row",
                facts={"sample_ids": len(ids), "lengths": len(lengths), "tags": len(tags)},
            )
        numbered = next((each for each in ids if not isinstance(each, str)), None)
        if numbered is not None:
            raise PayloadInvalidError(
                f"sample id {numbered!r} is no text: rows are kept by keys of text, such as "
                f"f'{{step}}-{{row}}'",
                facts={"sample_id": repr(numbered)},
            )
        twice = next((each for each in ids if ids.count(each) > 1), None) if _repeats(ids) else None
        if twice is not None:
            raise PayloadInvalidError(
                f"sample id {twice!r} is there {ids.count(twice)} times among {len(ids)}: a row "
                "is written and read once",
                facts={"sample_id": twice, "times": ids.count(twice)},
            )
        wrong = [row for row, each in enumerate(lengths) if not is_whole(each) or each < 0]
        if wrong:
            raise PayloadInvalidError(
                f"row {wrong[0]} has a length of {lengths[wrong[0]]!r}: give whole numbers from 0, "
                "of a tensor its tolist()",
                facts={"row": wrong[0], "length": repr(lengths[wrong[0]])},
            )
        object.__setattr__(self, "sample_ids", ids)
        object.__setattr__(self, "sequence_lengths", lengths)
        object.__setattr__(self, "tags", tags)

    def _check_kinds(self) -> None:
        """Refuse what is no partition, no list and no width."""
        lists: dict[str, object] = {
            "sample_ids": self.sample_ids,
            "sequence_lengths": self.sequence_lengths,
            "tags": self.tags,
        }
        wrong = {
            name: each
            for name, each in lists.items()
            if isinstance(each, str) or not isinstance(each, Iterable)
        }
        if not isinstance(self.partition_id, str) or not self.partition_id:
            wrong["partition_id"] = self.partition_id
        if not is_whole(self.pad_to_seqlen) or self.pad_to_seqlen < 0:
            wrong["pad_to_seqlen"] = self.pad_to_seqlen
        for name, each in wrong.items():
            raise PayloadInvalidError(
                f"{name} is {each!r}: give the name of a partition, a list with one of each kind a "
                "row, and a width from 0 on",
                facts={"field": name, "given": repr(each)[:200]},
            )

    def __len__(self) -> int:
        return len(self.sample_ids)

    def take(self, rows: Sequence[int]) -> RowMeta:
        """Return some of the rows, in the order given, without the plan.

        Raises:
            PayloadInvalidError: there is no such row, or none is left.
        """
        outside = [row for row in rows if not is_whole(row) or not 0 <= row < len(self)]
        if outside:
            raise PayloadInvalidError(
                f"row {outside[0]!r} is wanted of {len(self)}",
                facts={"row": repr(outside[0]), "rows": len(self)},
            )
        return replace(
            self,
            sample_ids=tuple(self.sample_ids[row] for row in rows),
            sequence_lengths=tuple(self.sequence_lengths[row] for row in rows),
            tags=tuple(self.tags[row] for row in rows),
            plan=None,
        )

    def slice(self, start: int, stop: int) -> RowMeta:
        """Return the rows from ``start`` to before ``stop``; otherwise as ``take``."""
        return self.take(range(start, stop))

    def drop(self, sample_ids: Collection[str]) -> RowMeta:
        """Return the rows that are not named.

        Raises:
            PayloadInvalidError: a name is none of these rows, or none is left.
        """
        if isinstance(sample_ids, str):  # its letters may be names
            sample_ids = (sample_ids,)
        strange = sorted(set(sample_ids) - set(self.sample_ids))
        if strange:
            raise PayloadInvalidError(
                f"sample id {strange[0]!r} is to be dropped and is none of the {len(self)} rows",
                facts={"sample_id": strange[0], "rows": len(self)},
            )
        gone = set(sample_ids)
        return self.take([row for row, each in enumerate(self.sample_ids) if each not in gone])

    def with_pad_target(self, *multiples: int) -> RowMeta:
        """Return it with the width that all ranks pad to: the longest row's, rounded up.

        To be minted once, of all rows of the step, by the driver: rows taken afterwards keep it,
        and doing it again changes nothing.

        Args:
            multiples: of the largest of these it is a multiple.

        Raises:
            PayloadInvalidError: a multiple is below 1.
        """
        wrong = [each for each in multiples if not is_size(each)]
        if wrong:
            raise PayloadInvalidError(
                f"a width is to be a multiple of {wrong[0]!r}: give whole numbers from 1 on",
                facts={"multiple": repr(wrong[0])},
            )
        multiple = max(multiples, default=1)
        width = -(-max(self.sequence_lengths) // multiple) * multiple
        return self if self.pad_to_seqlen else replace(self, pad_to_seqlen=width)


def join_rows(metas: Sequence[RowMeta]) -> RowMeta:
    """Return the rows of several, one behind the other, without their plans.

    Raises:
        PayloadInvalidError: they are of several partitions or widths, share a row, or are none.
    """
    partitions = list(dict.fromkeys(meta.partition_id for meta in metas))
    widths = sorted({meta.pad_to_seqlen for meta in metas})
    if len(partitions) != 1 or len(widths) != 1:
        raise PayloadInvalidError(
            f"rows of {len(partitions)} partitions ({', '.join(partitions)}) that pad to "
            f"{', '.join(map(str, widths)) or 'nothing'} are to be joined: give those of one",
            facts={"partitions": len(partitions), "widths": len(widths)},
        )
    return RowMeta(
        partition_id=partitions[0],
        sample_ids=tuple(each for meta in metas for each in meta.sample_ids),
        sequence_lengths=tuple(each for meta in metas for each in meta.sequence_lengths),
        tags=tuple(each for meta in metas for each in meta.tags),
        pad_to_seqlen=widths[0],
    )


def _repeats(ids: Sequence[str]) -> bool:
    return len(set(ids)) < len(ids)
