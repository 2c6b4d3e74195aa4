"""Reads the golden cases while tests are collected, so that each case is a test of its own.

The folder is `TEACHER_LOGITS_CASES`, or `data` beside this file. A file that is not there, or
that holds no case, is an error at collection: cases that did not run must not look like cases
that passed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
import torch

from teacher_logits_client.ray.row_orders import DynamicBatching, SequencePacking

FOLDER = Path(os.environ.get("TEACHER_LOGITS_CASES") or Path(__file__).parent / "data")


@dataclass(frozen=True, kw_only=True)
class RuleCase:
    """What upstream said of one call; `failing_rule` is what it stopped at, if anything."""

    id: str
    tag: str
    params: dict[str, int]
    failing_rule: str | None
    node_local: bool | None
    """By brute force, which is ours: None where nothing is known."""

    @property
    def has_size_below_one(self) -> bool:
        return min(self.params.values()) < 1


class Value(TypedDict, total=False):
    """One key of a batch; `dtype` and `shape` belong to tensors."""

    kind: str
    data: list[object]
    dtype: str
    shape: list[int]


@dataclass(frozen=True, kw_only=True)
class PadCase:
    """What upstream made of one batch: `expected`, or the name of the exception."""

    id: str
    tag: str
    batch: dict[str, Value]
    target_size: int
    same_object: bool
    expected: dict[str, Value] | None
    error: str | None


@dataclass(frozen=True, kw_only=True)
class DpShardCase:
    """How upstream cut a batch over ranks; `error` names what it raised instead."""

    id: str
    tag: str
    total: int
    batch_size: int | None
    shards: int
    input_lengths: list[int] | None
    batching: SequencePacking | DynamicBatching | None
    error: str | None
    rows_per_shard: list[list[int]]
    micro_batch_indices: list[list[list[list[int]]]]
    micro_batch_lengths: list[list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class HandleCase:
    """What workers answered, (rank, a handle a row) each, and the rows upstream made of it."""

    id: str
    worker_results: list[tuple[int, list[dict[str, int]]]]
    expected: list[list[dict[str, int]]] | None


def rule_cases(name: str) -> list[RuleCase]:
    return [
        RuleCase(
            id=line["id"],
            tag=line["tag"],
            params=line["params"],
            failing_rule=line["failing_rule"],
            node_local=line.get("dense_layout_node_local"),
        )
        for line in map(json.loads, _lines(name))
    ]


def pad_cases(name: str) -> list[PadCase]:
    return [
        PadCase(
            id=line["id"],
            tag=line["tag"],
            batch=line["batch"],
            target_size=line["target_size"],
            same_object=line["same_object"],
            expected=line["expected"],
            error=line["error"],
        )
        for line in map(json.loads, _lines(name))
    ]


def dp_shard_cases(name: str) -> list[DpShardCase]:
    return [
        DpShardCase(
            id=line["id"],
            tag=line["tag"],
            total=line["total"],
            batch_size=line["batch_size"],
            shards=line["shards"],
            input_lengths=line["input_lengths"],
            batching=_batching(line),
            error=line["error"],
            rows_per_shard=line.get("rows_per_shard", []),
            micro_batch_indices=line.get("micro_batch_indices", []),
            micro_batch_lengths=line.get("micro_batch_lengths", []),
        )
        for line in map(json.loads, _lines(name))
    ]


def handle_cases(name: str) -> list[HandleCase]:
    return [
        HandleCase(
            id=line["id"],
            worker_results=[
                (each["dp_rank"], each["per_sample_handles"]) for each in line["worker_results"]
            ],
            expected=[row["teacher_shards"] for row in line["expected"]] if line["ok"] else None,
        )
        for line in map(json.loads, _lines(name))
    ]


def _batching(line: dict[str, Any]) -> SequencePacking | DynamicBatching | None:
    if packing := line["sequence_packing_args"]:
        return SequencePacking(
            max_tokens_per_micro_batch=packing["max_tokens_per_microbatch"],
            pad_multiple=packing["sequence_length_pad_multiple"],
            algorithm=packing["algorithm"],
        )
    if dynamic := line["dynamic_batching_args"]:
        return DynamicBatching(
            max_tokens_per_micro_batch=dynamic["max_tokens_per_microbatch"],
            length_round=dynamic["sequence_length_round"],
        )
    return None


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """What upstream plans for one student rank: its shards, and which part of each goes where."""

    id: str
    tag: str
    student_cp: int
    student_cp_rank: int
    full_seq_len: int
    full_vocab_size: int
    shards: list[dict[str, Any]]
    plan: list[dict[str, Any]]


def plan_cases(name: str) -> list[PlanCase]:
    return [
        PlanCase(
            id=line["id"],
            tag=f"tp{line['teacher_tp']}-cp{line['teacher_cp']}-student-cp{line['student_cp']}",
            student_cp=line["student_cp"],
            student_cp_rank=line["student_cp_rank"],
            full_seq_len=line["full_seq_len"],
            full_vocab_size=line["full_vocab_size"],
            shards=line["shards"],
            plan=line["plan"],
        )
        for line in map(json.loads, _lines(name))
    ]


def arrays(name: str, group: str) -> dict[str, np.ndarray]:
    """The fields of one group of an .npz file, without the group's name."""
    with np.load(FOLDER / name) as file:
        found = {key.removeprefix(group): file[key] for key in file if key.startswith(group)}
    if not found:
        raise ValueError(f"{FOLDER / name} has no group {group}")
    return found


def tensors(name: str) -> dict[str, Any]:
    """What is in one .pt file, which holds tensors and plain values."""
    found: dict[str, Any] = torch.load(FOLDER / name, weights_only=True)
    return found


def each(cases: list[RuleCase] | list[PadCase] | list[PlanCase]) -> pytest.MarkDecorator:
    """One test a case, named `id-tag`."""
    return pytest.mark.parametrize("case", cases, ids=[f"{case.id}-{case.tag}" for case in cases])


def _lines(name: str) -> list[str]:
    lines = (FOLDER / name).read_text("utf-8").splitlines()
    if not lines:
        raise ValueError(f"{FOLDER / name} holds no case")
    return lines
