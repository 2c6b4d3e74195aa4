"""Deferred payloads through a real Ray: teacher worker to student worker, past the driver."""

from __future__ import annotations

import runpy
import time
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch

from teacher_logits.errors import (
    AlignmentError,
    DeadlinePassedError,
    EngineError,
    GridMismatchError,
    PayloadInvalidError,
    ProducerLostError,
    TeacherLogitsError,
)
from teacher_logits.layout import ElementType
from teacher_logits_client.ray import (
    DeferredPayload,
    DeferredTeacher,
    Path,
    Side,
    SlabRoom,
    StepPlan,
    agree,
    attach,
    fetch,
    hand_over,
    open_payload,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.cluster_utils import Cluster

    from teacher_logits_client.ray import Agreement

VOCABULARY = 1000
STEP = 7
PATIENCE_SECONDS = 60.0
N, S, K = 4, 6, 3  # of a rank


class _Worker:
    """A process that does what it is told; references among its arguments are resolved."""

    def run(self, function: Callable[..., object], *arguments: object) -> object:
        torch.set_num_threads(1)
        return function(*arguments)


Worker: Any = ray.remote(num_cpus=0)(_Worker)


class Cast:
    """Two teacher ranks, a replica of the second, and two student ranks.

    Two processes play them, so that torch is imported twice alone. No payload stays in the one
    that made it.
    """

    def __init__(self) -> None:
        self.teachers = [Worker.remote() for _ in range(2)]
        self.replica = self.teachers[0]
        self.students = self.teachers[::-1]

    def answers(
        self, *, rows: tuple[range, ...] = (range(4), range(4, 8)), **more: Any
    ) -> list[Any]:
        """What every worker of the teacher answers to a step, as references."""
        answers = [
            worker.run.remote(teach, rank, rows[rank], more)
            for rank, worker in enumerate(self.teachers)
        ]
        return [*answers, self.replica.run.remote(teach, 1, rows[1], more, False)]


_rooms: dict[str, SlabRoom] = {}


def teach(rank: int, rows: range, more: dict[str, Any], is_representative: bool = True) -> object:
    """Put the payload of one rank, in a worker."""
    made: dict[str, Any] = {}
    if more.get("slab"):
        made["room"] = _rooms.setdefault("room", SlabRoom(budget_bytes=1 << 22))
    if more.get("packed"):
        made |= {"value_type": ElementType.BFLOAT16, "id_type": ElementType.INT32}
    teacher = DeferredTeacher(
        data_parallel_rank=rank,
        is_representative=is_representative,
        vocabulary_size=VOCABULARY,
        **made,
    )
    positions = more.get("positions", {}).get(rank, S)
    return teacher.put(
        told_of(rows, positions=positions, size=more.get("size", 1)),
        step=more.get("step", STEP),
        rows=rows,
        input_ids=more.get("input_ids"),
    )


def told_of(rows: range, *, positions: int = S, size: int = 1) -> dict[str, torch.Tensor]:
    """What a teacher says of rows: every row differs, and zeros stand behind S positions."""
    shape = (len(rows), positions, K * size)
    values = torch.arange(len(rows) * positions * K * size, dtype=torch.float32).view(shape)
    values = values % 97 + torch.tensor(list(rows)).view(-1, 1, 1)
    ids = (values.long() * 7 + 1) % VOCABULARY
    return {"topk_logits": values, "topk_indices": ids}


def take(payload: object, wanted: dict[str, Any], packed: bool = False) -> dict[str, torch.Tensor]:
    """Attach a payload to a batch in a student worker, and return what came of it."""
    tokens = wanted.pop("input_ids", torch.zeros(wanted.pop("count", N), S, dtype=torch.int64))
    batch: dict[str, object] = {"input_ids": tokens}
    attach(batch, payload, vocabulary_size=VOCABULARY, **wanted)
    return {name: each for name, each in batch.items() if isinstance(each, torch.Tensor)}


def address_of(payload: object) -> tuple[int, int]:
    """Where the first value lies in the worker, and the bytes of its own that it has."""
    flat = open_payload(payload)
    views = flat.views()
    assert sum(float(each.sum()) for each in views.values())
    return views["topk_logits"].data_ptr(), resident_bytes("RssAnon")


def refuse(*_: object) -> object:
    raise EngineError("out of memory on this replica", facts={"gpu": 3})


def resident_bytes(field: str) -> int:
    text = File("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{field}:")[2].split()[0])


@pytest.fixture(scope="module")
def cast(cluster: Cluster) -> Cast:
    return Cast()


def plan(**more: Any) -> StepPlan:
    side = Side(data_parallel_size=2, global_batch_size=8)
    given: dict[str, Any] = {"row_count": 8, "student": side, "teacher": side, "top_k": K}
    return StepPlan(**{**given, "sequence_length": S, "vocabulary_size": VOCABULARY, **more})


AGREED = agree(plan())
OF_ANY_K = agree(plan(top_k=None))


def trained(cast: Cast, arguments: tuple[object, ...], **wanted: Any) -> list[Any]:
    """What every student rank finds in its batch."""
    return fetch(
        [
            worker.run.remote(take, argument, {"step": STEP, **wanted})
            for worker, argument in zip(cast.students, arguments, strict=False)
        ],
        timeout=PATIENCE_SECONDS,
        what="the student's step",
    )


def handed(cast: Cast, agreed: Agreement = AGREED, **more: Any) -> Any:
    return hand_over(cast.answers(**more), agreed, step=STEP, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("slab", [False, True], ids=["object", "slab"])
def test_a_student_gets_what_its_teacher_rank_said(cast: Cast, slab: bool) -> None:
    over = handed(cast, slab=slab)

    assert (over.path, over.reason) == (Path.DEFERRED, None)
    for rank, batch in enumerate(trained(cast, over.arguments, top_k=K)):
        told = told_of(range(rank * N, rank * N + N))
        assert torch.equal(batch["teacher_topk_logits"], told["topk_logits"])
        assert torch.equal(batch["teacher_topk_indices"], told["topk_indices"])


def test_packed_payloads_are_half_as_large_and_have_the_same_ids(cast: Cast) -> None:
    over = handed(cast, packed=True)

    assert over.descriptions[0].size_bytes < 6 * N * S * K + 512
    for rank, batch in enumerate(trained(cast, over.arguments)):
        told = told_of(range(rank * N, rank * N + N))
        assert torch.equal(batch["teacher_topk_indices"], told["topk_indices"])
        assert torch.equal(batch["teacher_topk_logits"], told["topk_logits"].bfloat16())


def test_a_reference_is_handed_on_as_it_is(cast: Cast) -> None:
    answers: list[Any] = fetch(cast.answers(), what="answers")
    over = hand_over(answers, AGREED, step=STEP)

    assert over.arguments == (answers[0].source, answers[1].source)
    assert all(isinstance(each, ray.ObjectRef) for each in over.arguments)
    assert answers[2].source is None  # a replica puts nothing


@pytest.mark.parametrize("who", [0, 2], ids=["a representative", "another replica"])
def test_a_replica_that_raises_fails_the_driver_with_its_own_error(cast: Cast, who: int) -> None:
    answers = cast.answers()
    failing = [*cast.teachers, cast.replica][who]
    answers[who] = failing.run.remote(refuse)

    with pytest.raises(EngineError, match="this replica") as failure:
        hand_over(answers, AGREED, step=STEP, timeout=PATIENCE_SECONDS)
    assert failure.value.facts == {"gpu": 3}


def test_a_rules_refusal_in_a_worker_keeps_its_violations(cast: Cast) -> None:
    with pytest.raises(GridMismatchError) as refusal:
        fetch([cast.replica.run.remote(misplan)], timeout=PATIENCE_SECONDS, what="a plan")

    assert [each.rule for each in refusal.value.violations] == ["not_positive"]
    assert refusal.value.facts == {"top_k": 0}


def misplan() -> object:
    return agree(plan(top_k=0))


def test_a_replica_that_never_answers_runs_into_the_deadline(cast: Cast) -> None:
    never = Worker.options(num_cpus=1000).remote()  # nowhere to be placed
    answers = [*cast.answers(), never.run.remote(refuse)]

    with pytest.raises(DeadlinePassedError, match="step 7"):
        hand_over(answers, AGREED, step=STEP, timeout=0.1)
    ray.kill(never)


def test_a_replica_that_fails_is_heard_before_one_that_hangs(cast: Cast) -> None:
    never = Worker.options(num_cpus=1000).remote()
    answers = [never.run.remote(refuse), cast.replica.run.remote(refuse)]

    with pytest.raises(EngineError):
        hand_over(answers, AGREED, step=STEP, timeout=PATIENCE_SECONDS)
    ray.kill(never)


def test_unequal_data_parallel_sizes_take_the_materialised_way(cast: Cast) -> None:
    agreed = agree(plan(student=Side(data_parallel_size=1, global_batch_size=8)))
    over = handed(cast, agreed)

    assert over.path is Path.MATERIALISED
    assert over.reason is not None
    assert over.reason.rule == "dp_mismatch"
    (batch,) = trained(cast, over.arguments, count=8, rows=tuple(range(8)))
    assert torch.equal(batch["teacher_topk_logits"], both_ranks("topk_logits"))


def both_ranks(name: str) -> torch.Tensor:
    return torch.cat([told_of(range(4))[name], told_of(range(4, 8))[name]])


@pytest.mark.parametrize("slab", [False, True], ids=["object", "slab"])
def test_rows_of_another_order_are_put_into_the_students(cast: Cast, slab: bool) -> None:
    mine = ((7, 1, 4, 0), (2, 6, 3, 5))
    agreed = agree(plan(student=Side(data_parallel_size=2, global_batch_size=8, rows=mine)))
    over = handed(cast, agreed, slab=slab)

    assert over.reason is not None
    assert over.reason.rule == "row_order_mismatch"
    for rank, batch in enumerate(trained(cast, over.arguments)):
        for name in ("topk_logits", "topk_indices"):
            assert torch.equal(batch[f"teacher_{name}"], both_ranks(name)[list(mine[rank])])


def test_ragged_payloads_are_padded_behind_the_rows_lengths(cast: Cast) -> None:
    agreed = agree(plan(lengths=[4] * 4 + [6] * 4))
    over = handed(cast, agreed, positions={0: 4, 1: 9})

    assert over.path is Path.MATERIALISED
    assert over.reason.rule == "sequence_length_mismatch"
    first, second = trained(cast, over.arguments)
    short = told_of(range(4), positions=4)["topk_logits"]
    assert torch.equal(first["teacher_topk_logits"][:, :4], short)
    assert not first["teacher_topk_logits"][:, 4:].any()
    long = told_of(range(4, 8), positions=9)["topk_logits"]
    assert torch.equal(second["teacher_topk_logits"], long[:, :S])


@pytest.mark.parametrize("lengths", [None, [6] * 8], ids=["unknown", "longer than the payload"])
def test_a_payload_that_lacks_positions_is_refused(cast: Cast, lengths: list[int] | None) -> None:
    with pytest.raises(PayloadInvalidError, match="positions"):
        handed(cast, agree(plan(lengths=lengths)), positions={0: 4})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"step": STEP + 1}, "step 8"),
        ({"rows": (range(1, 5), range(4, 8))}, "another order"),
        ({"rows": (range(4), range(4, 7))}, "3 rows"),
        ({"size": 2}, "6 entries a position"),
        ({"positions": {0: 5}}, "5 positions a row"),
    ],
)
def test_the_driver_refuses_what_was_not_agreed(cast: Cast, more: Any, said: str) -> None:
    with pytest.raises(PayloadInvalidError, match=said):
        handed(cast, **more)


def test_the_driver_refuses_another_vocabulary(cast: Cast) -> None:
    with pytest.raises(PayloadInvalidError, match="vocabulary 50"):
        handed(cast, agree(plan(vocabulary_size=50)))


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (lambda told: [told[0], {"topk_logits": 1}, told[2]], "answered dict"),
        (lambda told: told[:1], "data-parallel ranks are 0 to 1"),
        (lambda told: [told[0], told[2]], "data-parallel ranks are 0 to 1"),
    ],
    ids=["another type", "a rank without an answer", "a rank without a payload"],
)
def test_the_driver_refuses_answers_of_another_kind_or_number(
    cast: Cast, answers: Callable[[list[object]], list[object]], said: str
) -> None:
    told = fetch(cast.answers(), what="answers")

    with pytest.raises(PayloadInvalidError, match=said):
        hand_over(answers(told), AGREED, step=STEP)


def test_replicas_that_disagree_are_refused(cast: Cast) -> None:
    answers = cast.answers()
    answers[2] = cast.replica.run.remote(teach, 1, range(4, 8), {"step": STEP + 1}, False)

    with pytest.raises(PayloadInvalidError, match="replicas of teacher rank 1"):
        hand_over(answers, AGREED, step=STEP, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("wanted", "facts"),
    [
        ({"step": STEP + 1}, {"has_step": STEP, "wanted_step": STEP + 1}),
        ({"rows": (0, 2, 1, 3)}, {"place": 1, "has_row": 1, "wanted_row": 2}),
        ({"count": 5}, {"what": "rows", "has": 4, "wanted": 5}),
        ({"top_k": 9}, {"what": "entries a position", "has": K, "wanted": 9}),
    ],
)
def test_a_students_refusal_comes_to_the_driver_typed(cast: Cast, wanted: Any, facts: Any) -> None:
    over = handed(cast)

    with pytest.raises(PayloadInvalidError) as refusal:
        trained(cast, over.arguments[:1], **wanted)
    assert refusal.value.facts == facts
    assert refusal.value.reason == "PAYLOAD_INVALID"


def test_a_student_with_other_tokens_is_refused(cast: Cast) -> None:
    tokens = torch.arange(N * S).view(N, S)
    over = handed(cast, input_ids=tokens)

    with pytest.raises(AlignmentError, match="row 2 of the batch"):
        trained(cast, over.arguments[:1], input_ids=tokens + torch.tensor([0, 0, 1, 0]).view(-1, 1))
    assert trained(cast, over.arguments[:1], input_ids=tokens)


def test_a_reference_that_ray_did_not_resolve_is_named(cast: Cast) -> None:
    over = handed(cast)

    with pytest.raises(PayloadInvalidError, match="ObjectRef"):
        fetch([cast.students[0].run.remote(unpacked, [over.arguments[0]])], what="a step")


def unpacked(nested: list[object]) -> object:
    return take(nested[0], {})


def test_no_payload_changes_nothing(cast: Cast) -> None:
    (batch,) = trained(cast, (None,))

    assert list(batch) == ["input_ids"]


def test_two_reads_share_one_address_and_take_no_memory_of_the_readers(cast: Cast) -> None:
    """T45. A torch tensor would be copied by every get."""
    over = handed(cast, OF_ANY_K, size=60_000)
    size = over.descriptions[0].size_bytes
    assert size > 50_000_000

    reader = cast.students[0]
    found: Any = [
        *fetch([reader.run.remote(address_of, over.arguments[0])], what="a read"),
        *fetch([reader.run.remote(address_of, over.arguments[0])], what="a read"),
    ]
    (first, before), (second, after) = found
    assert first == second
    assert after - before < size // 4


def test_the_drivers_memory_does_not_grow_by_the_payloads(cast: Cast) -> None:
    """R01. All of it is counted, the object store's pages too."""
    handed(cast, OF_ANY_K, size=60)
    grown = []
    for size in (60, 60_000):
        File("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        over = handed(cast, OF_ANY_K, size=size)
        reads = zip(cast.students, over.arguments, strict=True)
        fetch([worker.run.remote(address_of, each) for worker, each in reads], what="reads")
        grown.append(resident_bytes("VmHWM") - before)
    assert grown[1] < 2_000_000 + max(0, grown[0])


def test_a_payload_of_the_drivers_own_is_handed_on_and_copied_into_a_callers_buffer(
    cast: Cast,
) -> None:
    """R51."""
    teacher = DeferredTeacher(data_parallel_rank=0)
    mine = teacher.put(told_of(range(8)), step=STEP, rows=range(8))
    alone = Side(data_parallel_size=1, global_batch_size=8)
    over = hand_over([mine], agree(plan(student=alone, teacher=alone)), step=STEP)

    assert fetch([cast.students[0].run.remote(copied, over.arguments[0])], what="a copy") == [True]


def copied(payload: object) -> bool:
    told = told_of(range(8))
    out = {name: torch.zeros_like(each) for name, each in told.items()}
    batch: dict[str, object] = {"input_ids": torch.zeros(8, S)}
    attach(batch, payload, out=out)
    return batch["teacher_topk_logits"] is out["topk_logits"] and all(
        torch.equal(out[name], told[name]) for name in told
    )


def test_the_example_learns_from_payloads_that_its_driver_never_sees(cast: Cast) -> None:
    example = File(__file__).parents[2] / "examples" / "ray_deferred.py"
    handed, losses = runpy.run_path(str(example))["main"](ranks=1)

    assert handed.path is Path.DEFERRED
    assert losses[-1] < losses[0] / 2


def test_a_worker_that_dies_before_it_answers_is_a_typed_error(cast: Cast) -> None:
    doomed = Worker.remote()
    ray.kill(doomed)

    with pytest.raises(ProducerLostError):
        hand_over([doomed.run.remote(refuse)], AGREED, step=STEP, timeout=PATIENCE_SECONDS)


def test_a_worker_that_dies_with_its_payload_is_a_typed_error_within_the_deadline(
    cast: Cast,
) -> None:
    """T46. Ray may answer for a moment from what it still has; never longer, and never wrongly.

    Stands last: one of the cast dies of it.
    """
    doomed = cast.teachers[0]
    (answer,) = fetch([doomed.run.remote(teach, 0, range(8), {})], what="an answer")
    assert isinstance(answer, DeferredPayload)
    ray.kill(doomed)

    until = time.monotonic() + PATIENCE_SECONDS
    raised: TeacherLogitsError | None = None
    while not isinstance(raised, ProducerLostError):
        assert time.monotonic() < until, raised
        try:
            trained(cast, (answer.source,), count=8)
        except TeacherLogitsError as error:
            raised = error
