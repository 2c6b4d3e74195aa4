"""Sharding: whether what a teacher's ranks divide can be put together again.

Pure. One rule, ``sharding_unavailable``, for all that stands in the way (and ``shard_taken``, for
a shard that has a publisher):

    no model grid, whose ranks would be the shards
    a sequence cut in two ways
    vocabulary parts without raw logits in fp32 and normalisers, by which they are merged
    a nucleus, which is one of the whole vocabulary and not of its parts
    a rank whose columns are padding alone, and that has nothing to publish
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from teacher_logits import grid
from teacher_logits.errors import Violation
from teacher_logits.layout import ColumnKind, ElementType
from teacher_logits.selection_rules import TopK
from teacher_logits.shard_parts import (
    BY_SEQUENCE,
    ShardedBy,
    columns_of_rank,
    is_shard,
    part_grid,
    shard_of,
)

if TYPE_CHECKING:
    from teacher_logits.locality import ModelGrid
    from teacher_logits.profiles import TeacherProfile
    from teacher_logits_server.admission.holders import Standing

_MERGED_BY = (ColumnKind.TOPK_LOGITS, ColumnKind.LOGSUMEXP)


def check_sharding(profile: TeacherProfile) -> list[Violation]:
    """Return where the shards that a publisher's profile speaks of cannot be put together."""
    by, model = profile.sharded_by, profile.model_grid
    if not by:
        return []
    if model is None:
        return [_refused("model_grid is not given: its ranks are what divides the rows", profile)]
    violations = []
    if all(each in by for each in BY_SEQUENCE):
        violations.append(
            _refused("the sequence is cut in one way: give 'sequence' or 'zigzag'", profile)
        )
    sizes = (profile.vocabulary_size, profile.head_rows, model.tensor_parallel_size)
    if ShardedBy.VOCABULARY in by and all(map(grid.is_size, sizes)):
        violations += _check_vocabulary(profile, model)
    return violations


def shard_taken(profile: TeacherProfile, standing: Standing) -> Violation:
    """Return the rule that a publisher breaks whose shard another one publishes."""
    shard, grid = shard_of(profile), part_grid(profile)
    own = "model_grid= ranks" if grid.count > 1 else "data_parallel_rank="
    copies = "" if is_shard(profile) else "; this rank holds a copy, which is not published"
    return Violation(
        rule="shard_taken",
        message=f"shard {grid.text_of(shard)} of teacher {profile.teacher_id!r} is published by "
        f"{standing.text}: end that one first, or give each publisher its own {own}{copies}",
        facts={"shard": shard, **standing.facts},
    )


def _check_vocabulary(profile: TeacherProfile, model: ModelGrid) -> list[Violation]:
    violations = []
    lacking = ", ".join(kind.value for kind in _MERGED_BY if kind not in profile.columns)
    if lacking or profile.value_type is ElementType.BFLOAT16:
        has = f"has value_type {profile.value_type.value}" + (lacking and f" and lacks {lacking}")
        violations.append(
            _refused(
                f"vocabulary parts are merged by topk_logits in float32 and logsumexp, and the "
                f"profile {has}: give columns=PUBLISHED_COLUMNS (of teacher_logits.profiles), "
                "which has both, and value_type 'float16' or 'float32'",
                profile,
            )
        )
    if not isinstance(profile.selection, TopK):
        violations.append(
            _refused(
                f"selection is {profile.selection.name}, which is one of the whole vocabulary: "
                "vocabulary parts hold the K best, selection=TopK()",
                profile,
            )
        )
    columns = columns_of_rank(profile)
    is_rank = model.tensor_parallel_rank < model.tensor_parallel_size  # grid speaks of others
    if is_rank and columns.start >= profile.vocabulary_size:
        violations.append(
            _refused(
                f"this rank's columns are {columns.start} to {columns.stop - 1}, and the ids end "
                f"at {profile.vocabulary_size - 1}: it holds padding alone, and publishes nothing",
                profile,
            )
        )
    return violations


def _refused(why: str, profile: TeacherProfile) -> Violation:
    by = ", ".join(each.value for each in profile.sharded_by)
    return Violation(
        rule="sharding_unavailable",
        message=f"the teacher's shards are divided by {by}: {why}",
        facts={"sharded_by": by},
    )
