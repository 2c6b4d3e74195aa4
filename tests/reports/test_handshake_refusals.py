"""Every rule of the handshake, broken over the wire: its name, its numbers and its status."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeAlias

import grpc
import pytest
from tests.clocks import answer_early
from tests.reports.conftest import FINGERPRINT
from tests.reports.raw import TIMEOUT_SECONDS, Raw, Refused, connect_raw, refused
from tests.transport_suite.dense_teacher import VOCABULARY_SIZE, DenseTeacher
from tests.transport_suite.writing import embedded_server

import teacher_logits_client as tl
from teacher_logits.errors import (
    RequestInvalidError,
    SessionRefusedError,
    UnknownTeacherError,
)
from teacher_logits.profiles import PROTOCOL_VERSION
from teacher_logits.v1 import teacher_logits_service_pb2
from teacher_logits.wire import student_to_wire

Code = grpc.StatusCode
Facts: TypeAlias = dict[str, object]
Door: TypeAlias = Callable[[int], Raw]

GRID = tl.BatchGrid(global_batch_size=16, data_parallel_size=4, micro_batch_size=2)
#: Two nodes of eight, groups of two; the teacher's tensor-parallel size is the door's number.
NODES = tl.ModelGrid(node_count=2, gpus_per_node=8, tensor_parallel_size=2)
TOP_K = 20


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Servers whose teachers have a grid, by its tensor-parallel size."""
    with ExitStack() as stack:
        doors: dict[int, Raw] = {}

        def at(tensor_parallel_size: int) -> Raw:
            if tensor_parallel_size not in doors:
                server = embedded_server(
                    tmp_path_factory.mktemp("door"),
                    pool_bytes=1 << 20,
                    engine=DenseTeacher(tokenizer_fingerprint=FINGERPRINT),
                    batch_grid=GRID,
                    model_grid=dataclasses.replace(
                        NODES, tensor_parallel_size=tensor_parallel_size
                    ),
                    top_k=TOP_K,
                )
                address = stack.enter_context(server).address
                doors[tensor_parallel_size] = stack.enter_context(connect_raw(address))
            return doors[tensor_parallel_size]

        yield at


def a_student(**given: object) -> tl.StudentProfile:
    """A student that is admitted, but for what is given."""
    usual: dict[str, object] = {
        "batch_grid": GRID,
        "model_grid": NODES,
        "tokenizer_fingerprint": FINGERPRINT,
        "vocabulary_size": VOCABULARY_SIZE,
        "top_k": TOP_K,
        "transports": (tl.Transport.STREAM,),
    }
    return tl.StudentProfile(**{**usual, **given})  # type: ignore[arg-type]


def a_grid(**given: int) -> tl.BatchGrid:
    return dataclasses.replace(GRID, **given)


def nodes(**given: int) -> tl.ModelGrid:
    return dataclasses.replace(NODES, **given)


def knock(
    raw: Raw,
    profile: tl.StudentProfile,
    *,
    version: int = PROTOCOL_VERSION,
    timeout: float = TIMEOUT_SECONDS,
) -> Refused:
    """Ask for a session that must be refused."""
    request = teacher_logits_service_pb2.OpenSessionRequest(
        request_id="knock", protocol_version=version, profile=student_to_wire(profile)
    )
    return refused(lambda: raw.student.OpenSession(request, timeout=timeout))


RULE = tl.Locality.RULE

#: What is broken, and by it: the rules in their order, and some of the numbers.
BROKEN: dict[str, tuple[dict[str, object], list[str], Facts]] = {
    "gbs-0": (
        {"batch_grid": a_grid(global_batch_size=0)},
        ["not_positive"],
        {"student_global_batch_size": 0},
    ),
    "dp-negative": (
        {"batch_grid": a_grid(data_parallel_size=-4)},
        ["not_positive"],
        {"student_data_parallel_size": -4},
    ),
    "mbs-0": (
        {"batch_grid": a_grid(micro_batch_size=0)},
        ["not_positive"],
        {"student_micro_batch_size": 0},
    ),
    "nodes-0": ({"model_grid": nodes(node_count=0)}, ["not_positive"], {"student_node_count": 0}),
    "gpus-0": (
        {"model_grid": nodes(gpus_per_node=0)},
        ["not_positive"],
        {"student_gpus_per_node": 0},
    ),
    "tp-0": (
        {"model_grid": nodes(tensor_parallel_size=0)},
        ["not_positive"],
        {"student_tensor_parallel_size": 0},
    ),
    "cp-negative": (
        {"model_grid": nodes(context_parallel_size=-1)},
        ["not_positive"],
        {"student_context_parallel_size": -1},
    ),
    "readers-0": ({"readers_per_rank": 0}, ["not_positive"], {"readers_per_rank": 0}),
    "k-0": ({"top_k": 0}, ["not_positive"], {"top_k": 0}),
    "k-negative": ({"top_k": -1}, ["not_positive"], {"top_k": -1}),
    "vocabulary-negative": (
        {"vocabulary_size": -5},
        ["not_positive"],
        {"student_vocabulary_size": -5},
    ),
    "gbs": (
        {"batch_grid": a_grid(global_batch_size=32)},
        ["gbs_mismatch"],
        {"student_global_batch_size": 32, "teacher_global_batch_size": 16},
    ),
    "dp": (
        {"batch_grid": a_grid(data_parallel_size=3)},
        ["student_dp_indivisible"],
        {"global_batch_size": 16, "student_data_parallel_size": 3},
    ),
    "mbs": (
        {"batch_grid": a_grid(micro_batch_size=3)},
        ["student_mbs_indivisible"],
        {"student_rows_per_rank": 4, "student_micro_batch_size": 3},
    ),
    "rank": (
        {"data_parallel_rank": 4},
        ["rank_out_of_range"],
        {"student_data_parallel_rank": 4, "student_data_parallel_rank_count": 4},
    ),
    "rank-negative": (
        {"data_parallel_rank": -1},
        ["rank_out_of_range"],
        {"student_data_parallel_rank": -1},
    ),
    "tp-rank": (
        {"model_grid": nodes(tensor_parallel_rank=2)},
        ["rank_out_of_range"],
        {"student_tensor_parallel_rank": 2},
    ),
    "readers": (
        {"readers_per_rank": 3},
        ["readers_exceed_group"],
        {"readers_per_rank": 3, "student_tensor_parallel_size": 2},
    ),
    "nodes": (
        {"model_grid": nodes(node_count=4), "locality": RULE},
        ["topology_mismatch"],
        {"student_node_count": 4, "teacher_node_count": 2},
    ),
    "gpus": (
        {"model_grid": nodes(gpus_per_node=4), "locality": RULE},
        ["topology_mismatch"],
        {"student_gpus_per_node": 4, "teacher_gpus_per_node": 8},
    ),
    "dp-of-nodes": (
        {"batch_grid": a_grid(data_parallel_size=8), "locality": RULE},
        ["dp_mismatch"],
        {"student_data_parallel_size": 8, "teacher_data_parallel_size": 4},
    ),
    "group": (
        {"model_grid": nodes(tensor_parallel_size=4), "locality": RULE},
        ["group_mismatch"],
        {"student_group_size": 4, "teacher_group_size": 2},
    ),
    "no-model-grid": (
        {"model_grid": None, "locality": RULE},
        ["model_grid_missing"],
        {"missing": "the student's model grid"},
    ),
    "tokenizer": (
        {"tokenizer_fingerprint": "e" * 32},
        ["tokenizer_mismatch"],
        {"student_fingerprint": "e" * 32, "teacher_fingerprint": FINGERPRINT},
    ),
    "vocabulary": (
        {"vocabulary_size": VOCABULARY_SIZE + 1},
        ["vocab_mismatch"],
        {"student_vocabulary_size": 1501, "teacher_vocabulary_size": 1500},
    ),
    "k-over-limit": (
        {"top_k": TOP_K + 1},
        ["top_k_too_large"],
        {"top_k": 21, "teacher_top_k": 20, "vocabulary_size": VOCABULARY_SIZE},
    ),
    "k-over-vocabulary": (
        {"vocabulary_size": 7, "vocabulary_policy": tl.VocabularyPolicy.TRUNCATE, "top_k": 8},
        ["top_k_too_large"],
        {"top_k": 8, "vocabulary_size": 7},
    ),
    "temperature-0": ({"temperatures": (0.0,)}, ["temperature_unavailable"], {}),
    "temperature-nan": ({"temperatures": (math.nan,)}, ["temperature_unavailable"], {}),
    "temperature-inf": ({"temperatures": (math.inf,)}, ["temperature_unavailable"], {}),
    "temperatures": (
        {"temperatures": (2.0, 3.0, 4.0, 5.0, 6.0)},
        ["temperature_unavailable"],
        {"temperature_count": 5, "most_temperatures": 4},
    ),
    "column": (
        {"columns": (tl.ColumnKind.TOPK_LOGITS,)},
        ["column_unavailable"],
        {"missing": "topk_logits"},
    ),
    "value-type": (
        {"value_type": tl.ElementType.INT32},
        ["column_unavailable"],
        {"value_type": "int32"},
    ),
    "engine": ({"engine": "vllm"}, ["engine_mismatch"], {"student_engine": "vllm"}),
    "arithmetic": (
        {"arithmetic_type": "bfloat16"},
        ["arithmetic_type_mismatch"],
        {"student_arithmetic_type": "bfloat16", "teacher_arithmetic_type": "float32"},
    ),
    "sizes-and-more": (
        {"batch_grid": a_grid(global_batch_size=0, micro_batch_size=0), "top_k": -3},
        ["not_positive"],
        {"student_global_batch_size": 0, "student_micro_batch_size": 0, "top_k": -3},
    ),
    "all-at-once": (
        {
            "batch_grid": tl.BatchGrid(
                global_batch_size=18, data_parallel_size=3, micro_batch_size=0
            ),
            "data_parallel_rank": 3,
            "model_grid": nodes(node_count=1, tensor_parallel_size=4),
            "readers_per_rank": 5,
            "locality": RULE,
            "tokenizer_fingerprint": "e" * 32,
            "vocabulary_size": 3,
            "top_k": 64,
            "temperatures": (-1.0,),
            "columns": (tl.ColumnKind.LOGITS,),
            "engine": "vllm",
            "arithmetic_type": "int8",
        },
        [
            *("not_positive", "gbs_mismatch", "student_dp_indivisible", "rank_out_of_range"),
            *("readers_exceed_group", "topology_mismatch", "dp_mismatch", "group_mismatch"),
            *("tokenizer_mismatch", "vocab_mismatch", "top_k_too_large"),
            *("temperature_unavailable", "column_unavailable"),
            *("engine_mismatch", "arithmetic_type_mismatch"),
        ],
        {"student_micro_batch_size": 0},
    ),
}
ARGUMENTS = {
    *("not_positive", "gbs_mismatch", "student_dp_indivisible", "student_mbs_indivisible"),
    *("rank_out_of_range", "readers_exceed_group"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_with_its_numbers(door: Door, name: str) -> None:
    given, rules, facts = BROKEN[name]
    answer = knock(door(2), a_student(**given))
    assert_refused(answer, rules, facts)


@pytest.mark.parametrize(
    ("tensor_parallel_size", "rule"), [(16, "group_exceeds_node"), (3, "group_not_node_aligned")]
)
def test_groups_that_span_nodes_are_refused_although_both_sides_agree(
    door: Door, tensor_parallel_size: int, rule: str
) -> None:
    grid = nodes(tensor_parallel_size=tensor_parallel_size)
    answer = knock(door(tensor_parallel_size), a_student(model_grid=grid, locality=RULE))
    assert_refused(answer, [rule], {"group_size": tensor_parallel_size, "gpus_per_node": 8})


def test_a_client_of_another_release_is_refused_with_both_versions(door: Door) -> None:
    answer = knock(door(2), a_student(), version=7)
    facts: Facts = {"client_version": 7, "server_version": PROTOCOL_VERSION}
    assert_refused(answer, ["protocol_version"], facts)


def test_a_newer_client_hears_of_its_version_and_not_of_words_unknown_here(door: Door) -> None:
    profile = student_to_wire(a_student())
    profile.transports.append(99)  # type: ignore[arg-type]
    request = teacher_logits_service_pb2.OpenSessionRequest(
        request_id="newer", protocol_version=PROTOCOL_VERSION + 1, profile=profile
    )
    answer = refused(lambda: door(2).student.OpenSession(request, timeout=TIMEOUT_SECONDS))
    facts: Facts = {
        "client_version": PROTOCOL_VERSION + 1,
        "server_version": PROTOCOL_VERSION,
    }
    assert_refused(answer, ["protocol_version"], facts)


def assert_refused(answer: Refused, rules: list[str], facts: Facts) -> None:
    error = answer.error
    assert isinstance(error, SessionRefusedError)
    named = [violation.rule for violation in error.violations]
    left_out = int(error.facts.get("violations_left_out", 0))
    assert named == rules[: len(rules) - left_out]
    assert not left_out or re.search(r"; and \d+ more$", error.message)
    assert facts.items() <= error.facts.items()
    for value in facts.values():
        assert str(value) in error.message
    argument = rules[0] in ARGUMENTS
    assert answer.code is (Code.INVALID_ARGUMENT if argument else Code.FAILED_PRECONDITION)


def test_a_student_that_breaks_nothing_is_admitted(door: Door) -> None:
    request = teacher_logits_service_pb2.OpenSessionRequest(
        request_id="fine", protocol_version=PROTOCOL_VERSION, profile=student_to_wire(a_student())
    )
    reply = door(2).student.OpenSession(request, timeout=TIMEOUT_SECONDS)
    assert reply.session.session_id


def test_a_refused_student_leaves_no_session(door: Door) -> None:
    before = session_ids(door)
    for given, _, _ in BROKEN.values():
        knock(door(2), a_student(**given))
    assert session_ids(door) <= before  # those of other tests end in their own time


def session_ids(door: Door) -> set[str]:
    return {each.session_id for each in door(2).inspect().sessions}


def test_an_unknown_teacher_is_refused_with_those_there_are(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is waited for, until the call's deadline.
    answer_early(monkeypatch)
    answer = knock(door(2), a_student(teacher_id="gpt-9"))
    assert isinstance(answer.error, UnknownTeacherError)
    assert answer.code is Code.NOT_FOUND
    facts = dict(answer.error.facts)
    assert 0 < float(facts.pop("waited_seconds")) < 60
    assert facts == {"teacher_id": "gpt-9", "teachers": "teacher"}


@pytest.mark.parametrize("student_id", ["", "two words", "x" * 129, "\0"])
def test_a_student_id_that_is_no_name_is_refused(door: Door, student_id: str) -> None:
    answer = knock(door(2), a_student(student_id=student_id))
    assert isinstance(answer.error, RequestInvalidError)
    assert answer.code is Code.INVALID_ARGUMENT
