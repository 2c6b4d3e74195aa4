"""Shards as the ranks of a teacher write them, in memory alone. No test."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.client.publishing.sharded import own_logits

from teacher_logits.tensors import column_tensors
from teacher_logits_client.drafts.checks import finish
from teacher_logits_client.drafts.columns import DraftColumns, describe
from teacher_logits_client.drafts.parts import DraftPart
from teacher_logits_client.drafts.rows import Given, make_draft_rows
from teacher_logits_client.drafts.shard_rows import hold_part
from teacher_logits_client.openers.host_payload import HostPayload
from teacher_logits_client.payloads.columns import LeasedColumns
from teacher_logits_client.payloads.row_columns import Part
from teacher_logits_client.targets.leased_targets import Made

if TYPE_CHECKING:
    import torch

    import teacher_logits_client as tl
    from teacher_logits.payload import Payload


def written(profile: tl.TeacherProfile, logits: torch.Tensor, **given: object) -> Part:
    """What a student reads of a rank that selects from its part of the logits [N,S,V]."""
    return part_over(*written_bytes(profile, logits, **given))


def written_bytes(
    profile: tl.TeacherProfile,
    logits: torch.Tensor,
    *,
    ids: object,
    lengths: object = None,
    windows: object = None,
) -> tuple[Payload, bytearray]:
    """The payload of such a rank and its bytes. Bad rows are masked."""
    given = Given(
        input_ids=ids,  # type: ignore[arg-type]
        lengths=lengths,  # type: ignore[arg-type]
        attention_mask=None,
        windows=windows,  # type: ignore[arg-type]
        loss_mask=None,
    )
    count = len(logits)
    rows = hold_part(profile, make_draft_rows(profile, range(count), count, given), given)
    payload = describe(profile, 0, rows)
    shard = payload.key.shard if payload.key is not None else 0
    payload = replace(payload, payload_id=f"p-{shard}")
    data = bytearray(payload.size_bytes)
    tensors = column_tensors(data, payload.columns)
    columns = DraftColumns(tensors, rows, temperatures=len(payload.temperatures))
    DraftPart(
        range(count),
        draft_rows=rows,
        columns=columns,
        payload=payload,
        check_open=lambda: None,
    ).select(own_logits(profile, logits))
    finish(columns, rows, payload, mask=True)
    return payload, data


def part_over(payload: Payload, data: bytearray) -> Part:
    """All rows of a payload that lies in some bytes."""
    made = Made(what="it", again="it", facts={})
    leased = LeasedColumns(payload, HostPayload(memoryview(data)), made, watch=None)
    return Part(payload, leased, first=0, row_count=payload.row_count)
