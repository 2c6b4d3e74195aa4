"""Deferred payloads for trainers that Ray drives: from teacher worker to student worker directly.

    agreement = agree(StepPlan(...))                             driver, before the teacher computes
    return DeferredTeacher(...).put(top_k, step=..., rows=...)   each teacher worker
    handed = hand_over(answers, agreement, step=...)             driver: every replica heard
    attach(batch, payload, step=..., rows=...)                   each student worker

Needs torch, NumPy and Ray, and no server of ours, nor gRPC. Names are imported when they are first
asked for: ``agree`` and the rules behind it need neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from teacher_logits_client.ray.agreement import Agreement, Path, Side, StepPlan, agree
    from teacher_logits_client.ray.attaching import attach
    from teacher_logits_client.ray.descriptions import PayloadDescription
    from teacher_logits_client.ray.driver import HandedOver, hand_over, require_deferred
    from teacher_logits_client.ray.fetching import fetch, typed_errors
    from teacher_logits_client.ray.flat import FlatPayload
    from teacher_logits_client.ray.global_order import RankHandles, in_global_order
    from teacher_logits_client.ray.opening import open_payload
    from teacher_logits_client.ray.rooms import DeferredPayload
    from teacher_logits_client.ray.row_orders import (
        DynamicBatching,
        RowOrder,
        SequencePacking,
        row_order,
    )
    from teacher_logits_client.ray.slab_room import SlabRoom
    from teacher_logits_client.ray.teacher import DeferredDraft, DeferredTeacher

__all__ = [
    "Agreement",
    "DeferredDraft",
    "DeferredPayload",
    "DeferredTeacher",
    "DynamicBatching",
    "FlatPayload",
    "HandedOver",
    "Path",
    "PayloadDescription",
    "RankHandles",
    "RowOrder",
    "SequencePacking",
    "Side",
    "SlabRoom",
    "StepPlan",
    "agree",
    "attach",
    "fetch",
    "hand_over",
    "in_global_order",
    "open_payload",
    "require_deferred",
    "row_order",
    "typed_errors",
]

_HOMES = {
    "Agreement": "agreement",
    "DeferredDraft": "teacher",
    "DeferredPayload": "rooms",
    "DeferredTeacher": "teacher",
    "DynamicBatching": "row_orders",
    "FlatPayload": "flat",
    "HandedOver": "driver",
    "Path": "agreement",
    "PayloadDescription": "descriptions",
    "RankHandles": "global_order",
    "RowOrder": "row_orders",
    "SequencePacking": "row_orders",
    "Side": "agreement",
    "SlabRoom": "slab_room",
    "StepPlan": "agreement",
    "agree": "agreement",
    "attach": "attaching",
    "fetch": "fetching",
    "hand_over": "driver",
    "in_global_order": "global_order",
    "open_payload": "opening",
    "require_deferred": "driver",
    "row_order": "row_orders",
    "typed_errors": "fetching",
}
"""Names imported when first asked for, each with its module, which is called otherwise: a module
that is imported takes the place of what has its name."""


def _find(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


if not TYPE_CHECKING:  # or a misspelt name would pass as an object
    __getattr__ = _find
