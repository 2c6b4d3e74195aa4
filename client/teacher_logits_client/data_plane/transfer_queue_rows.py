"""Rows in TransferQueue, held against what it does without a word.

Of 0.1.11: a key that is not there is left out of an answer, and so is a field; a row of another
element type than its field's is taken, and the controller's table is wrong from then on; a write
whose announcement failed is reported as done; so is a clearing. So whatever is written or cleared
is looked up again at the controller, and whatever is read is counted.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import (
    ObjectLostError,
    PayloadConflictError,
    PayloadInvalidError,
    TransportFailure,
)
from teacher_logits_client.data_plane.jagged import check_rows
from teacher_logits_client.data_plane.row_store import RowsMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from teacher_logits_client.data_plane.row_meta import RowMeta
    from teacher_logits_client.data_plane.transfer_queue_calls import Metadata, Queue


async def put_new(queue: Queue, meta: RowMeta, fields: Mapping[str, torch.Tensor]) -> None:
    """Write rows that are not there, with their tags.

    Raises:
        PayloadConflictError: some are.
    """
    known = await _known(queue, meta.partition_id, meta.sample_ids)
    if known.size:
        raise PayloadConflictError(
            f"{known.size} of {len(meta)} rows are in partition {meta.partition_id} already: keys "
            "are minted once a step, and cleared at its end",
            facts={"rows": len(meta), "there": known.size},
        )
    await put(queue, meta, fields, tags=[dict(tag) for tag in meta.tags])


async def put_beside(queue: Queue, meta: RowMeta, fields: Mapping[str, torch.Tensor]) -> None:
    """Add fields to rows that are there, none of which has one of them.

    Raises:
        RowsMissingError, PayloadConflictError: it is not so.
    """
    known = await _whole(queue, meta)
    own = torch.tensor(known.global_indexes)
    asked = (queue.async_get_production_status([name], meta.partition_id) for name in fields)
    for name, (indexes, status) in zip(fields, await asyncio.gather(*asked), strict=True):
        if indexes is None or status is None:
            continue  # no row of the partition has it
        there = int((torch.isin(indexes, own) & (status[:, 0] == 1)).sum())
        if there:
            raise PayloadConflictError(
                f"{there} of {len(meta)} rows of partition {meta.partition_id} have {name} "
                "already: one writer writes a row's field, once a step",
                facts={"field": name, "rows": len(meta), "there": there},
            )
    await put(queue, meta, fields)


async def put(
    queue: Queue,
    meta: RowMeta,
    fields: Mapping[str, torch.Tensor],
    *,
    tags: list[dict[str, object]] | None = None,
) -> None:
    """Write fields of rows, whatever is there, and see that the controller has them.

    Raises:
        PayloadInvalidError: there is none, one has another number of rows, or the partition holds
            it in another element type.
        TransportFailure: they were not announced.
    """
    if not fields:
        raise PayloadInvalidError(f"no field of {len(meta)} rows is to be written: name one")
    for name, value in fields.items():
        check_rows(name, value, len(meta))
    from tensordict import TensorDict
    from transfer_queue import async_kv_batch_put

    tensors = {name: value.detach().cpu() for name, value in fields.items()}
    await async_kv_batch_put(
        keys=list(meta.sample_ids),
        partition_id=meta.partition_id,
        fields=TensorDict(tensors, batch_size=[len(meta)]),
        tags=tags,
    )
    known = await _whole(queue, meta)
    for name, value in fields.items():
        if name not in known.field_names:
            raise TransportFailure(
                f"{name} of {len(meta)} rows was written and never announced: TransferQueue's log "
                "says why; clear the rows and write them again",
                facts={"field": name, "rows": len(meta)},
            )
        held = known.field_schema[name]["dtype"]
        if held != value.dtype:
            raise PayloadInvalidError(
                f"{name} was written as {value.dtype} into partition {meta.partition_id}, which "
                f"holds it as {held}: a field has one type; clear these {len(meta)} rows",
                facts={"field": name, "type": str(value.dtype), "held": str(held)},
            )


async def get(queue: Queue, meta: RowMeta, names: list[str]) -> dict[str, torch.Tensor]:
    """Return fields of rows as they come: nested, but for single numbers.

    Raises:
        RowsMissingError: a row or a field is not there.
        ObjectLostError: the controller knows of it, and storage does not have it.
    """
    chosen = (await _whole(queue, meta)).select_fields(names)
    missing = [name for name in names if name not in chosen.field_names]
    if missing or not names or not chosen.is_ready:
        raise RowsMissingError(
            f"of {len(meta)} rows of partition {meta.partition_id} not every one has "
            f"{', '.join(missing or names) or 'a field that was named'}: not written yet, or "
            "their writer gives it another name",
            facts={"rows": len(meta), "fields": ", ".join(missing or names)},
        )
    data = await queue.async_get_data(chosen)
    return {name: _checked(name, data[name], len(meta)) for name in names}


async def let_go(queue: Queue, partition_id: str, sample_ids: Sequence[str]) -> None:
    """Clear rows, of those that are there, and see that they are gone.

    Raises:
        TransportFailure: some are not.
    """
    known = await _known(queue, partition_id, sample_ids)
    if not known.size:
        return
    await queue.async_clear_samples(known)
    left = (await _known(queue, partition_id, sample_ids)).size
    if left:
        raise TransportFailure(
            f"{left} of {known.size} rows of partition {partition_id} are still there after they "
            "were cleared: TransferQueue's log says why",
            facts={"rows": known.size, "left": left},
        )


async def keys_of(queue: Queue, partition_id: str) -> tuple[str, ...]:
    """Return the keys of all rows of a partition; none of one that is not there."""
    found = await queue.async_kv_list(partition_id)
    return tuple(found.get(partition_id, {}))


async def _known(queue: Queue, partition_id: str, sample_ids: Sequence[str]) -> Metadata:
    return await queue.async_kv_retrieve_meta(
        keys=list(sample_ids), partition_id=partition_id, create=False
    )


async def _whole(queue: Queue, meta: RowMeta) -> Metadata:
    """Return what is known of rows that are all there."""
    known = await _known(queue, meta.partition_id, meta.sample_ids)
    if known.size != len(meta):
        there = set(await keys_of(queue, meta.partition_id))
        missing = [each for each in meta.sample_ids if each not in there]
        raise RowsMissingError(
            f"{len(meta) - known.size} of {len(meta)} rows are not in partition "
            f"{meta.partition_id}, such as {', '.join(map(repr, missing[:3]))}: not written yet, "
            "or cleared at the end of their step",
            facts={"rows": len(meta), "missing": len(meta) - known.size},
        )
    return known


def _checked(name: str, value: object, rows: int) -> torch.Tensor:
    """Return a field that was read, where it is a tensor with a row for each asked for."""
    if not isinstance(value, torch.Tensor):
        raise ObjectLostError(
            f"{name} came back as a {type(value).__name__}: storage has lost some of {rows} rows, "
            "or they are no tensors",
            facts={"field": name, "rows": rows},
        )
    has = len(value.unbind()) if value.is_nested else len(value)
    if has != rows:
        raise ObjectLostError(
            f"{name} came back with {has} rows and {rows} were asked for",
            facts={"field": name, "rows": has, "wanted": rows},
        )
    return value
