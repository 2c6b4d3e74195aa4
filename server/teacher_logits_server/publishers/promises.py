"""Promises: what a publisher says that it will write, and whether a payload is that.

Pure. The rules of a publisher's own profile, in the order in which they are named:

    not_positive            every size is a whole number of at least 1
    batch_grid_missing      a publisher says how it cuts the step's rows
    teacher_dp_indivisible  the step's rows split over the teacher's ranks
    teacher_mbs_indivisible a rank's rows split into micro batches
    rank_out_of_range       the publisher is one of these ranks
    vocab_mismatch          the head has a row for each id of the vocabulary
    top_k_too_large         no more entries a position than there are ids
    temperature_unavailable four temperatures at most besides 1, from 0.01 to 100
    column_unavailable      a column that this release does not carry, one that every payload
                            has and this publisher's lack, or a value type that log-probabilities
                            cannot have
    sharding_unavailable    shards that cannot be put together again (``sharding``)
    protocol_version        the two sides speak no version in common (``protocol``)

Whether it agrees with the teacher's other publishers is ``publishers``' to say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from teacher_logits import grid, locality
from teacher_logits.errors import PayloadInvalidError, Violation
from teacher_logits.keys import STEP_LIMIT
from teacher_logits.layout import COLUMN_RULES, ColumnKind
from teacher_logits.payload import MAX_TEMPERATURES, check_payload
from teacher_logits.profiles import NEEDED_COLUMNS, PUBLISHED_COLUMNS
from teacher_logits.protocol import OURS, Spoken, check_protocol
from teacher_logits.shard_parts import part_of, shard_of
from teacher_logits_server.admission.capability import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    listed,
)
from teacher_logits_server.publishers.sharding import check_sharding

if TYPE_CHECKING:
    from teacher_logits.errors import Fact
    from teacher_logits.payload import Payload
    from teacher_logits.profiles import TeacherProfile


def promised(profile: TeacherProfile) -> TeacherProfile:
    """Return a profile with the temperatures that its payloads have: 1, then the others.

    None at all means any for an engine; a publisher writes temperature 1 then.
    """
    temperatures = tuple(dict.fromkeys((1.0, *profile.temperatures)))
    return replace(profile, temperatures=temperatures)


def check_profile(profile: TeacherProfile, *, protocol_version: int) -> list[Violation]:
    """Return every rule that a publisher's profile breaks by itself."""
    batch, model = profile.batch_grid, profile.model_grid
    sizes = {
        "vocabulary_size": profile.vocabulary_size,
        "head_rows": profile.head_rows,
        "top_k": profile.top_k,
        "max_row_tokens": profile.max_row_tokens,
    }
    if batch is not None:
        sizes |= grid.batch_sizes(batch, side="teacher")
    if model is not None:
        sizes |= locality.model_sizes(model, side="teacher")
    violations = grid.check_sizes(sizes)
    if batch is None:
        violations.append(_grid_missing())
    else:
        own = grid.check_own_grid(batch, side="teacher")
        violations += [violation for violation in own if violation.rule != "not_positive"]
        violations += grid.check_rank(
            profile.data_parallel_rank,
            batch.data_parallel_size,
            name="teacher_data_parallel_rank",
        )
    if model is not None:
        violations += locality.check_model_ranks(model, side="teacher")
    return [
        *violations,
        *_check_head(profile),
        *_check_scores(profile),
        *check_sharding(profile),
        *check_protocol(Spoken.only(protocol_version), OURS),
    ]


def check_promised(
    profile: TeacherProfile, payload: Payload, row_positions: tuple[int, ...], *, real_rows: int
) -> None:
    """Refuse a payload that is not what its publisher's profile says.

    Raises:
        PayloadInvalidError: with what was said and what is.
    """
    check_payload(payload)
    key = payload.key
    if key is None or not 0 <= key.step < STEP_LIMIT:
        raise PayloadInvalidError(
            "a registered payload is named by its teacher, a step from 0 on and below "
            f"{STEP_LIMIT}, and its shard",
            facts={"step": -1 if key is None else key.step, "limit": STEP_LIMIT},
        )
    types = {column.kind: column.element_type.value for column in payload.columns}
    value_type = types.get(ColumnKind.TOPK_LOGPROBS, profile.value_type.value)
    says: list[tuple[str, Fact, Fact]] = [
        ("teacher_id", key.teacher_id, profile.teacher_id),
        ("shard", key.shard, shard_of(profile)),
        ("part", repr(payload.part), repr(part_of(profile))),
        ("top_k", payload.top_k, profile.top_k),
        ("vocabulary_size", payload.vocabulary_size, profile.vocabulary_size),
        ("temperatures", listed(payload.temperatures), listed(promised(profile).temperatures)),
        # What a part's runs are is looked at with the part (``check_payload``).
        ("columns", _names(types.keys() - {ColumnKind.ROW_RUNS}), _names(profile.columns)),
        ("value_type", value_type, profile.value_type.value),
        ("selection", repr(payload.selection), repr(profile.selection)),
    ]
    for name, has, should in says:
        if has != should:
            raise PayloadInvalidError(
                f"the payload has {name} {has}, and its publisher's profile says {should}",
                facts={f"payload_{name}": has, f"profile_{name}": should},
            )
    _check_rows(profile, payload, row_positions, real_rows)


def _check_rows(
    profile: TeacherProfile, payload: Payload, row_positions: tuple[int, ...], real_rows: int
) -> None:
    size = profile.batch_grid.global_batch_size if profile.batch_grid is not None else 0
    if not 0 <= real_rows <= size:
        raise PayloadInvalidError(
            f"a step has {size} rows, and {real_rows} of them cannot be real; give 1 to {size}, or "
            "0 for all",
            facts={"real_rows": real_rows, "global_batch_size": size},
        )
    end = payload.first_row + payload.row_count
    if payload.row_count < 1 or end > (real_rows or size):
        raise PayloadInvalidError(
            f"rows {payload.first_row} to {end - 1} are not among the step's {real_rows or size} "
            "real rows",
            facts={
                "first_row": payload.first_row,
                "row_count": payload.row_count,
                "real_rows": real_rows or size,
            },
        )
    if len(row_positions) != payload.row_count or min(row_positions) < 0:
        raise PayloadInvalidError(
            f"{len(row_positions)} rows have their positions counted, and the payload has "
            f"{payload.row_count}; give each row a count of at least 0",
            facts={"row_positions": len(row_positions), "row_count": payload.row_count},
        )
    if sum(row_positions) != payload.position_count:
        raise PayloadInvalidError(
            f"the rows have {sum(row_positions)} positions together, and the payload "
            f"{payload.position_count}",
            facts={
                "row_positions": sum(row_positions),
                "position_count": payload.position_count,
            },
        )


def _check_head(profile: TeacherProfile) -> list[Violation]:
    """Return where sizes that are sizes do not fit each other."""
    ids, rows, top_k = profile.vocabulary_size, profile.head_rows, profile.top_k
    violations = []
    if grid.is_size(ids) and grid.is_size(rows) and rows < ids:
        violations.append(
            Violation(
                rule="vocab_mismatch",
                message=f"head_rows is {rows} and vocabulary_size {ids}: the head has a row for "
                "each id, and more where it is padded; give the columns that the whole head's "
                "logits have",
                facts={"teacher_head_rows": rows, "teacher_vocabulary_size": ids},
            )
        )
    if grid.is_size(ids) and grid.is_size(top_k) and top_k > ids:
        violations.append(
            Violation(
                rule="top_k_too_large",
                message=f"top_k is {top_k}, and the vocabulary has {ids} ids; give at most {ids}",
                facts={"top_k": top_k, "vocabulary_size": ids},
            )
        )
    return violations


def _check_scores(profile: TeacherProfile) -> list[Violation]:
    violations = []
    temperatures = promised(profile).temperatures
    in_range = all(MIN_TEMPERATURE <= t <= MAX_TEMPERATURE for t in temperatures)
    if len(temperatures) > MAX_TEMPERATURES or not in_range:
        violations.append(
            Violation(
                rule="temperature_unavailable",
                message=f"a payload cannot have temperatures {listed(temperatures)}; give at "
                f"most {MAX_TEMPERATURES - 1} besides 1, from {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}",
                facts={"temperatures": listed(temperatures)},
            )
        )
    violations += _check_columns(profile)
    types, _ = COLUMN_RULES[ColumnKind.TOPK_LOGPROBS]
    if profile.value_type not in types:
        may_be = ", ".join(sorted(t.value for t in types))
        violations.append(
            Violation(
                rule="column_unavailable",
                message=f"topk_logprobs cannot be {profile.value_type.value}; use {may_be}",
                facts={"value_type": profile.value_type.value, "value_types": may_be},
            )
        )
    return violations


def _check_columns(profile: TeacherProfile) -> list[Violation]:
    """Return where a publisher promises what nobody can carry, or lacks what everybody reads."""
    violations = []
    unknown = ", ".join(c.value for c in profile.columns if c not in PUBLISHED_COLUMNS)
    if unknown:
        has = ", ".join(c.value for c in PUBLISHED_COLUMNS)
        violations.append(
            Violation(
                rule="column_unavailable",
                message=f"this release does not carry {unknown}; leave it out of the profile's "
                f"columns, which may be {has}",
                facts={"missing": unknown, "columns": has},
            )
        )
    # Entries at another temperature are those of 1 and its normaliser.
    others = (ColumnKind.LOGSUMEXP,) if len(promised(profile).temperatures) > 1 else ()
    needed = (*NEEDED_COLUMNS, *others)
    lacking = ", ".join(c.value for c in needed if c not in profile.columns)
    if lacking:
        has = ", ".join(c.value for c in profile.columns) or "none"
        violations.append(
            Violation(
                rule="column_unavailable",
                message=f"the publisher's payloads have {has}, and a payload has "
                f"{', '.join(c.value for c in needed)}: give {lacking} too",
                facts={"lacking": lacking, "columns": has},
            )
        )
    return violations


def _grid_missing() -> Violation:
    return Violation(
        rule="batch_grid_missing",
        message="not given: the teacher's batch grid; a publisher's shards tile the rows of a "
        "step: give global batch size, data-parallel size and micro batch size",
    )


def _names(kinds: object) -> str:
    return ", ".join(sorted(kind.value for kind in kinds))  # type: ignore[attr-defined]
