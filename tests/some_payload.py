"""A payload for who cares for few of its fields."""

from teacher_logits.payload import Payload


def some_payload(**given: object) -> Payload:
    """One row of one position with one entry, without columns; ``given`` are other fields."""
    values = {
        "payload_id": "p-1",
        "teacher_id": "teacher",
        "teacher_revision": "",
        "first_row": 0,
        "row_count": 1,
        "position_count": 1,
        "top_k": 1,
        "temperatures": (1.0,),
        "vocabulary_size": 8,
        "columns": (),
        "size_bytes": 256,
        **given,
    }
    return Payload(**values)  # type: ignore[arg-type]
