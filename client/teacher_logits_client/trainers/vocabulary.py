"""How many ids a student can read and say, held against its teacher's and against its batches.

Promises that a head with fewer rows than the teacher has ids is refused before the first step,
and an id that the student cannot read before its forward: on a GPU that would end the process.
A head with more rows is padded, and fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from teacher_logits.errors import ConfigError, PayloadInvalidError, SessionRefusedError, Violation
from teacher_logits.grid import is_size
from teacher_logits.profiles import VocabularyPolicy

if TYPE_CHECKING:
    from teacher_logits.profiles import TeacherProfile


def rows_of_head(model: object) -> int:
    """Return how many ids a model of ``transformers`` can say; 0 where it does not tell."""
    rows = _rows_of(model, "get_output_embeddings", "out_features")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return rows or (int(size) if is_size(size) else 0)


def rows_of_embedding(model: object) -> int:
    """Return how many ids a model of ``transformers`` can read; 0 where it does not tell."""
    return _rows_of(model, "get_input_embeddings", "num_embeddings")


def check_head(rows: int, teacher: TeacherProfile, policy: VocabularyPolicy) -> None:
    """Let a head pass that can say every id of the teacher's; ``rows`` 0 is not known.

    Raises:
        SessionRefusedError: it cannot, and the teacher's ids are not cut to it.
    """
    ids = teacher.vocabulary_size
    if not 0 < rows < ids or policy is VocabularyPolicy.TRUNCATE:
        return
    message = (
        f"the student's head has {rows} rows, and the teacher has {ids} ids: those from {rows} on "
        f"it could not say; call model.resize_token_embeddings({ids}), or, where your rows have "
        "none of them, set vocabulary_policy='truncate'"
    )
    facts = {"student_head_rows": rows, "teacher_vocabulary_size": ids}
    raise SessionRefusedError([Violation(rule="vocab_mismatch", message=message, facts=facts)])


def check_ids(ids: torch.Tensor, model: object) -> None:
    """Let token ids [N,S] pass that a model can read, padding among them.

    Raises:
        PayloadInvalidError: with the first that it cannot, and its place.
    """
    rows = rows_of_embedding(model)
    if not rows or not ids.numel():
        return
    least, most = torch.aminmax(ids)
    if int(least) >= 0 and int(most) < rows:
        return
    row, column = ((ids < 0) | (ids >= rows)).nonzero()[0].tolist()
    found = int(ids[row, column])
    raise PayloadInvalidError(
        f"row {row} of input_ids has id {found} in column {column}, and the student's embedding "
        f"has {rows} rows, for ids from 0 to {rows - 1}: have tokens and padding in that range, or "
        "call model.resize_token_embeddings",
        facts={"row": row, "column": column, "id": found, "embedding_rows": rows},
    )


def policy_of(word: object) -> VocabularyPolicy:
    """Return the policy that a setting names.

    Raises:
        ConfigError: it is none.
    """
    try:
        return VocabularyPolicy(word)
    except ValueError:
        raise ConfigError(
            f"vocabulary_policy is {word!r}: give 'strict', or 'truncate' to have the teacher's "
            "ids beyond the student's head masked",
            facts={"vocabulary_policy": repr(word)},
        ) from None


def _rows_of(model: object, getter: str, field: str) -> int:
    find = getattr(model, getter, None)
    try:
        layer: object = find() if callable(find) else None
    except NotImplementedError:  # so says a model that has none
        layer = None
    rows = getattr(layer, field, None)
    return int(rows) if is_size(rows) else 0
