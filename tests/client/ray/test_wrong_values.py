"""What no step could mean is refused where it is given, in words of ours, before anything runs."""

from __future__ import annotations

import math
import os
import pickle
import pkgutil
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
import torch

import teacher_logits_client.ray as room_of_ray
from teacher_logits.errors import (
    ConfigError,
    ForkedClientError,
    GridMismatchError,
    PayloadInvalidError,
    RequestInvalidError,
)
from teacher_logits_client.ray.agreement import Side, StepPlan, agree
from teacher_logits_client.ray.attaching import attach
from teacher_logits_client.ray.driver import hand_over
from teacher_logits_client.ray.fetching import fetch
from teacher_logits_client.ray.global_order import RankHandles
from teacher_logits_client.ray.row_orders import SequencePacking
from teacher_logits_client.ray.slab_room import SlabRoom
from teacher_logits_client.ray.teacher import DeferredTeacher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from teacher_logits_client.ray.rooms import DeferredPayload

VALUES, IDS = torch.randn(2, 3, 4), torch.randint(0, 9, (2, 3, 4))
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 0]])
NAN = float("nan")


@pytest.fixture(scope="module")
def room() -> Iterator[SlabRoom]:
    made = SlabRoom(budget_bytes=1 << 20)
    yield made
    made.close()


def put(room: SlabRoom, **given: object) -> DeferredPayload:
    teacher = DeferredTeacher(data_parallel_rank=0, vocabulary_size=9, room=room)
    told: dict[str, object] = {"step": 1, "rows": (0, 1), **given}
    tensors = {"topk_logits": VALUES, "topk_indices": IDS}
    return teacher.put(tensors, **told)  # type: ignore[arg-type]


def test_no_module_takes_the_place_of_a_name_that_its_package_gives() -> None:
    modules = {each.name for each in pkgutil.iter_modules(room_of_ray.__path__)}

    assert not modules & set(room_of_ray.__all__)


@pytest.mark.parametrize(
    "given",
    [
        {"lengths": [1.5, 2, 3, 4]},
        {"lengths": [NAN, 2, 3, 4]},
        {"lengths": [-1, 2, 3, 4]},
        {"lengths": [True, 2, 3, 4]},
        {"lengths": "1234"},
        {"lengths": torch.ones(4, 2, dtype=torch.int64)},
        {"lengths": 4},
        {"student": None},
        {"student": Side(data_parallel_size=2, global_batch_size=4, rows=((0, 1), (2, None)))},  # type: ignore[arg-type]
        {"student": Side(data_parallel_size=2, global_batch_size=4, rows=(0, 1, 2, 3))},  # type: ignore[arg-type]
        {"student": Side(data_parallel_size=2, global_batch_size=4, rows=4)},  # type: ignore[arg-type]
        {"student": Side(data_parallel_size=2, global_batch_size=4, batching="packed")},  # type: ignore[arg-type]
    ],
)
def test_a_plan_of_what_is_no_number_is_refused(given: dict[str, object]) -> None:
    side = Side(data_parallel_size=2, global_batch_size=4)
    plan = StepPlan(**{"row_count": 4, "student": side, "teacher": side, **given})  # type: ignore[arg-type]
    with pytest.raises(GridMismatchError) as caught:
        agree(plan)
    assert caught.value.violations[0].rule == "not_whole"


def test_a_plan_is_a_plan() -> None:
    with pytest.raises(GridMismatchError, match="give a StepPlan"):
        agree(SequencePacking(max_tokens_per_micro_batch=4))  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [-1, 1.5, None, "0", True, NAN])
def test_a_teacher_workers_rank_is_a_number_from_0(rank: object) -> None:
    with pytest.raises(PayloadInvalidError, match="data_parallel_rank"):
        DeferredTeacher(data_parallel_rank=rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, 1.5, "9", NAN])
def test_a_vocabulary_has_a_size(size: object) -> None:
    with pytest.raises(PayloadInvalidError, match="vocabulary_size"):
        DeferredTeacher(data_parallel_rank=0, vocabulary_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS[0],
        TOKENS.tolist(),
        TOKENS + 0.5,
        TOKENS > 1,
        TOKENS + 2**32,
        TOKENS - 20,
        TOKENS.to_sparse(),
        torch.nested.nested_tensor([TOKENS[0], TOKENS[1]], layout=torch.jagged),
        torch.ones(2, 4, dtype=torch.int64),
    ],
    ids=["a row", "lists", "floats", "truths", "wide", "negative", "sparse", "nested", "longer"],
)
def test_what_is_no_tokens_has_no_digest(room: SlabRoom, tokens: object) -> None:
    with pytest.raises(PayloadInvalidError):
        put(room, input_ids=tokens)


def test_padding_behind_a_rows_length_may_be_no_token(room: SlabRoom) -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, -100]])

    assert put(room, input_ids=tokens, lengths=[3, 2]).description.tokens is not None
    with pytest.raises(PayloadInvalidError, match="where padding is none, give lengths"):
        put(room, input_ids=tokens)


def test_lengths_without_tokens_are_refused_and_not_forgotten(room: SlabRoom) -> None:
    with pytest.raises(PayloadInvalidError, match="without input_ids"):
        put(room, lengths=torch.tensor([3, 2]))


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": TOKENS, "input_lengths": torch.tensor([3])},
        {"input_ids": TOKENS, "input_lengths": torch.tensor([3.0, 2.5])},
        {"input_ids": TOKENS + 0.3},
        [TOKENS],
        None,
        MappingProxyType({"input_ids": TOKENS}),
    ],
)
def test_a_batch_that_is_none_is_refused(room: SlabRoom, batch: object) -> None:
    payload = put(room, input_ids=TOKENS, lengths=[3, 2])
    with pytest.raises(PayloadInvalidError):
        attach(batch, payload)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{"rows": 5}, {"rows": (NAN, 1)}, {"rows": (0.4, 1)}, {"vocabulary_size": "9"}]
)
def test_what_a_student_expects_are_numbers(room: SlabRoom, given: dict[str, object]) -> None:
    with pytest.raises(PayloadInvalidError):
        attach({"input_ids": TOKENS}, put(room), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "own",
    [
        None,
        [1.0],
        torch.zeros(2, 3, 4, dtype=torch.int64),
        torch.zeros(2, 3, 4, dtype=torch.complex64),
        torch.zeros(2, 3, 4, requires_grad=True),
        torch.zeros(1, 1, 1).expand(2, 3, 4),
    ],
    ids=["none", "a list", "whole numbers", "complex", "a parameter", "expanded"],
)
def test_memory_that_cannot_be_filled_is_refused(room: SlabRoom, own: object) -> None:
    out = {"topk_logits": own, "topk_indices": torch.zeros(2, 3, 4, dtype=torch.int64)}
    with pytest.raises(PayloadInvalidError):
        attach({"input_ids": TOKENS}, put(room), out=out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"shape": (2, 3)},
        {"shape": (2, -3, 4)},
        {"shape": (0, 3, 4)},
        {"shape": (2, 3.0, 4)},
        {"shape": None},
        {"value_type": "int64"},
        {"id_type": "uint8"},
    ],
)
def test_room_is_reserved_for_entries_alone(room: SlabRoom, given: dict[str, object]) -> None:
    teacher = DeferredTeacher(data_parallel_rank=0, room=room)
    told = {"shape": (2, 3, 4), "value_type": "float32", "id_type": "int64", **given}
    with pytest.raises(PayloadInvalidError):
        teacher.reserve(**told)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, None, "9", NAN, 1.5, True])
def test_a_slab_room_has_a_budget_and_keeps_a_number_of_payloads(size: object) -> None:
    with pytest.raises(PayloadInvalidError, match="budget_bytes"):
        SlabRoom(budget_bytes=size)  # type: ignore[arg-type]
    with pytest.raises(PayloadInvalidError, match="keep"):
        SlabRoom(budget_bytes=1, keep=size)  # type: ignore[arg-type]


def test_a_slab_room_that_is_closed_gives_no_room() -> None:
    made = SlabRoom(budget_bytes=1 << 20)
    teacher = DeferredTeacher(data_parallel_rank=0, room=made)
    draft = teacher.reserve(shape=(2, 3, 4), value_type="float32", id_type="int64")  # type: ignore[arg-type]
    for name, each in (("topk_logits", VALUES), ("topk_indices", IDS)):
        draft.tensors[name].copy_(each)
    made.close()
    made.close()

    with pytest.raises(RequestInvalidError, match="closed"):
        put(made)
    with pytest.raises(RequestInvalidError, match="closed"):
        draft.seal(step=1, rows=(0, 1))
    draft.discard()
    with pytest.raises(PayloadInvalidError, match="sealed or discarded"):
        draft.check()


def test_a_slab_room_does_not_travel(room: SlabRoom) -> None:
    with pytest.raises(RequestInvalidError, match="make one in each worker"):
        pickle.dumps(room)


def test_a_fork_does_not_write_into_its_parents_slabs(room: SlabRoom) -> None:
    put(room)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            put(room)
        except ForkedClientError as error:
            room.close()
            said = error.reason
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "FORKED_CLIENT"
    os.waitpid(child, 0)
    batch: dict[str, object] = {"input_ids": TOKENS}
    attach(batch, put(room))
    assert len(batch) == 3


@pytest.mark.parametrize("timeout", [0, -1, NAN, None, "1", math.inf])
def test_a_fetch_has_a_deadline(timeout: object) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        fetch([1], timeout=timeout, what="the step")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 5, "ab", {1: 2}])
def test_a_fetch_is_of_a_list(given: object) -> None:
    with pytest.raises(RequestInvalidError, match="give a list"):
        fetch(given, what="the step")  # type: ignore[arg-type]


def test_what_is_no_reference_is_fetched_without_a_cluster() -> None:
    assert fetch([1, "b"], what="the step") == [1, "b"]


@pytest.mark.parametrize(
    "given", [{"data_parallel_rank": None}, {"handles": None}, {"handles": "ab"}]
)
def test_handles_are_of_a_rank_and_one_a_row(given: dict[str, object]) -> None:
    with pytest.raises(PayloadInvalidError, match="one handle a row"):
        RankHandles(**{"data_parallel_rank": 0, "handles": (1,), **given})  # type: ignore[arg-type]


def test_a_process_of_no_cluster_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def start(*_: object, **__: object) -> None:
        pytest.fail("Ray would start a cluster here")

    monkeypatch.setattr(ray, "put", start)
    monkeypatch.setattr(ray, "get", start)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    teacher = DeferredTeacher(data_parallel_rank=0)
    with pytest.raises(RequestInvalidError, match="no worker and no driver"):
        teacher.put({"topk_logits": VALUES, "topk_indices": IDS}, step=1, rows=(0, 1))
    with pytest.raises(RequestInvalidError, match="no worker and no driver"):
        fetch([ray.ObjectRef.from_random()], what="the step")


@pytest.mark.parametrize("step", [None, NAN, 1.0, "1", True])
def test_a_hand_over_is_of_a_step(step: object) -> None:
    side = Side(data_parallel_size=1, global_batch_size=1)
    agreement = agree(StepPlan(row_count=1, student=side, teacher=side))
    with pytest.raises(PayloadInvalidError, match="step is"):
        hand_over([], agreement, step=step)  # type: ignore[arg-type]
