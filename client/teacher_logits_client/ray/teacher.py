"""The teacher worker's side: a payload is put where it was made, and a few bytes are answered.

    teacher = DeferredTeacher(data_parallel_rank=rank, vocabulary_size=V)       # once, in the actor
    ...
    return teacher.put(top_k, step=step, rows=rows)                             # from its method

What is returned holds the reference inside an object of its own, so that Ray does not fetch what
it names on the way through the driver. The worker owns what it put: the payload is lost with it
(``ProducerLostError``), and goes when the driver and the students have let go of it.

Promises: every value and id is looked at once, where it lies, before anything is put; a tensor is
copied once, straight to its place, from the device too. Of a rank's replicas (tensor, context and
pipeline parallel) only the representative puts bytes; the others' answers say what they have, and
that they did not fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits.errors import PayloadInvalidError
from teacher_logits.grid import is_whole
from teacher_logits.layout import ElementType
from teacher_logits.tensors import DTYPES
from teacher_logits.words import word_of
from teacher_logits_client.ray.descriptions import (
    ID_TYPES,
    INDICES,
    LOGITS,
    VALUE_TYPES,
    FlatColumn,
    PayloadDescription,
    lay_out_columns,
)
from teacher_logits_client.ray.flat import (
    check_holds_ids,
    check_holds_values,
    check_top_k,
    check_type,
    column_views,
    top_k_specs,
)
from teacher_logits_client.ray.given import check_count, check_sizes_given, whole_numbers
from teacher_logits_client.ray.rooms import DeferredPayload, ObjectRoom
from teacher_logits_client.ray.row_tokens import tokens_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import torch

    from teacher_logits_client.ray.descriptions import RowTokens
    from teacher_logits_client.ray.rooms import Room


class DeferredDraft:
    """Room for one payload, to be written into; ``seal`` puts it, and takes the tensors away.

    As a context manager it is discarded at the end of its block, unless it was sealed. A tensor
    that was kept views room which the next payload will be written into.
    """

    def __init__(self, teacher: DeferredTeacher, columns: tuple[FlatColumn, ...]) -> None:
        self._teacher = teacher
        self._columns = columns
        size = PayloadDescription(step=0, data_parallel_rank=0, rows=(), columns=columns).size_bytes
        self._buffer = teacher.room.take(size)
        self._id_range: tuple[int, int] | None = None
        self.tensors = column_views(self._buffer, columns)
        """``topk_logits`` and ``topk_indices``, [N,S,K], of the types that were asked for."""

    def __enter__(self) -> DeferredDraft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()

    def check(self) -> None:
        """Look at every value and id now, so that ``seal`` need not.

        Raises:
            PayloadInvalidError: see ``flat.check_top_k``; or the draft is sealed or discarded.
        """
        self._check_open()
        self._id_range = check_top_k(self.tensors, vocabulary_size=self._teacher.vocabulary_size)

    def seal(
        self,
        *,
        step: int,
        rows: Sequence[int],
        input_ids: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        id_range: tuple[int, int] | None = None,
    ) -> DeferredPayload:
        """Put the payload; ``rows`` are the global indices of its rows, in its order.

        With ``input_ids`` [N,S] and ``lengths`` [N] the rows' digests travel with it, and a student
        that has other tokens is refused. ``id_range``: where the caller has looked already.

        Raises:
            PayloadInvalidError: rows that do not fit, or see ``check``. The draft stays open.
            PoolFullError: the object store has no room.
        """
        self._check_open()
        self._id_range = id_range or self._id_range
        if self._id_range is None:
            self.check()
        description = self._teacher.describe(
            self._columns,
            step=step,
            rows=rows,
            id_range=self._id_range,
            tokens=tokens_of(input_ids, lengths, width=self._columns[0].shape[1]),
        )
        source = None
        if self._teacher.is_representative:
            source = self._teacher.room.put(description, self._buffer)
            self.tensors = {}
        self.discard()
        return DeferredPayload(description=description, source=source)

    def _check_open(self) -> None:
        if not self.tensors:
            raise PayloadInvalidError("this draft is sealed or discarded: reserve another")

    def discard(self) -> None:
        """Give the room back unread. A draft that is sealed or discarded stays so."""
        if self.tensors:
            self.tensors = {}
            self._teacher.room.give_back(self._buffer)


class DeferredTeacher:
    """One teacher worker; it keeps the room that its payloads are written into.

    ``value_type`` and ``id_type`` pack what ``put`` is given: bfloat16 and int32 are 6 bytes an
    entry instead of 12, and the values are rounded. ``room`` is Ray's object store, or slabs for
    students on this node (``slab_room``).
    """

    def __init__(
        self,
        *,
        data_parallel_rank: int,
        is_representative: bool = True,
        vocabulary_size: int | None = None,
        value_type: ElementType | None = None,
        id_type: ElementType | None = None,
        room: Room | None = None,
    ) -> None:
        """Take the worker's settings.

        Raises:
            PayloadInvalidError: a rank or a size is no such number, or no payload has the type.
        """
        check_count(data_parallel_rank, what="data_parallel_rank")
        check_sizes_given(vocabulary_size=vocabulary_size)
        self.vocabulary_size = vocabulary_size
        self.room = ObjectRoom() if room is None else room
        self.is_representative = is_representative
        self._rank = int(data_parallel_rank)
        types = {"value_type": value_type, "id_type": id_type}
        self._types = {
            name: None if each is None else word_of(ElementType, each, what=name)
            for name, each in types.items()
        }

    def reserve(
        self, *, shape: Sequence[int], value_type: ElementType, id_type: ElementType
    ) -> DeferredDraft:
        """Return room for [N,S,K] entries, for a teacher that can write in place: no copy then.

        Raises:
            PayloadInvalidError: ``shape`` is none, or no payload has values or ids of such a type.
            PoolFullError: there is no room.
        """
        sizes = whole_numbers(shape, what="shape")
        if len(sizes) != 3 or not all(sizes):
            raise PayloadInvalidError(
                f"shape is {sizes}: give [N,S,K], none of them 0", facts={"shape": str(sizes)}
            )
        kinds = (
            (LOGITS, word_of(ElementType, value_type, what="value_type"), VALUE_TYPES),
            (INDICES, word_of(ElementType, id_type, what="id_type"), ID_TYPES),
        )
        for name, kind, allowed in kinds:
            check_type(name, kind, allowed)
        return DeferredDraft(self, lay_out_columns((name, kind, sizes) for name, kind, _ in kinds))

    def put(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int,
        rows: Sequence[int],
        input_ids: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> DeferredPayload:
        """Put ``topk_logits`` and ``topk_indices`` [N,S,K] of a step's rows; see ``seal``.

        Raises:
            PayloadInvalidError: shape, type, rows or an id does not fit, or a value is no number.
            PoolFullError: there is no room.
        """
        specs = top_k_specs(tensors, **self._types)
        id_range = check_top_k(tensors, vocabulary_size=self.vocabulary_size)
        columns = lay_out_columns(specs)
        of_values, of_ids = (DTYPES[element_type] for _, element_type, _ in specs)
        check_holds_values(of_values, tensors[LOGITS])
        check_holds_ids(of_ids, id_range, tensors[INDICES])
        if not self.is_representative:
            told = self.describe(
                columns,
                step=step,
                rows=rows,
                id_range=id_range,
                tokens=tokens_of(input_ids, lengths, width=columns[0].shape[1]),
            )
            return DeferredPayload(description=told, source=None)
        with DeferredDraft(self, columns) as draft:
            for name, place in draft.tensors.items():
                place.copy_(tensors[name].detach())
            return draft.seal(
                step=step, rows=rows, input_ids=input_ids, lengths=lengths, id_range=id_range
            )

    def describe(
        self,
        columns: tuple[FlatColumn, ...],
        *,
        step: int,
        rows: Sequence[int],
        id_range: tuple[int, int] | None,
        tokens: RowTokens | None,
    ) -> PayloadDescription:
        """Return what is said of this worker's payload.

        Raises:
            PayloadInvalidError: there are not as many rows, or one is told twice or is no row.
        """
        held = columns[0].shape[0]
        told = whole_numbers(rows, what="rows")
        if len(told) != held or len(set(told)) != held:
            raise PayloadInvalidError(
                f"a payload of {held} rows was told {len(told)} of them, {len(set(told))} "
                "different: give the global index of each, as in agreement.teacher_rows",
                facts={"rows": held, "told": len(told), "different": len(set(told))},
            )
        if tokens is not None and len(tokens.digests) != held:
            raise PayloadInvalidError(
                f"a payload of {held} rows was given tokens of {len(tokens.digests)}",
                facts={"rows": held, "token_rows": len(tokens.digests)},
            )
        if not is_whole(step):
            raise PayloadInvalidError(
                f"step is {step!r}: give a whole number", facts={"step": repr(step)}
            )
        return PayloadDescription(
            step=int(step),
            data_parallel_rank=self._rank,
            rows=told,
            columns=columns,
            id_range=id_range,
            tokens=tokens,
        )
