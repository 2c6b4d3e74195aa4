"""Opening what a driver hands to a student worker, whichever way it lies."""

from __future__ import annotations

from teacher_logits.errors import PayloadInvalidError
from teacher_logits_client.ray.flat import FlatPayload
from teacher_logits_client.ray.rooms import DeferredPayload
from teacher_logits_client.ray.slab_reading import open_slab
from teacher_logits_client.ray.slab_references import SlabReference


def open_payload(given: object) -> FlatPayload:
    """Return the payload of what Ray gave a worker for a reference, or of a reference to a slab.

    Raises:
        PayloadInvalidError: it is no payload; most often a reference that Ray did not resolve.
        SlabOpenError, PayloadRetiredError: see ``slab_reading.open_slab``.
    """
    if isinstance(given, FlatPayload):
        return given
    if isinstance(given, DeferredPayload) and isinstance(given.source, SlabReference):
        return FlatPayload(description=given.description, buffer=open_slab(given.source))
    raise PayloadInvalidError(
        f"the worker was given {type(given).__name__} for its payload: pass what hand_over gave "
        "for its rank as an argument of its own, for Ray resolves no reference inside another "
        "object",
        facts={"type": type(given).__name__},
    )
