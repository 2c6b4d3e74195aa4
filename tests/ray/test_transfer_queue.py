"""A real TransferQueue: rows by their keys, what it leaves out without a word, and a whole step."""

from __future__ import annotations

import itertools
import runpy
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch
import transfer_queue

import teacher_logits_client as tl
from teacher_logits.errors import (
    DeadlinePassedError,
    ObjectLostError,
    PayloadConflictError,
    PayloadInvalidError,
    ServerUnreachableError,
    TransportFailure,
)
from teacher_logits_client import testing
from teacher_logits_client.data_plane.fields import FieldSpec, TopKForm
from teacher_logits_client.data_plane.jagged import pack_jagged
from teacher_logits_client.data_plane.padded import pad_jagged
from teacher_logits_client.data_plane.presharded import (
    IndependentReads,
    RankRows,
    Turn,
    run_presharded,
)
from teacher_logits_client.data_plane.row_meta import RowMeta
from teacher_logits_client.data_plane.row_store import (
    RowsMissingError,
    StepNotClearedError,
    cleared_at_end,
)
from teacher_logits_client.data_plane.teacher_fields import teacher_fields
from teacher_logits_client.data_plane.transfer_queue import TransferQueueStore, attach
from teacher_logits_client.data_plane.write_back import join_replies
from teacher_logits_client.trainers import nemo_rl, verl
from teacher_logits_client.trainers.nemo_rl import INDICES, LOGITS, TAIL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[2]
LONG = 60.0
K, V = 8, 256
FORM = TopKForm(k=K)
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0], [9, 9, 0, 0, 0]])
LENGTHS = (5, 3, 2)
NAMES = ("a", "b", "c")
partitions = (f"step-{number}" for number in itertools.count())


def make_store() -> tuple[TransferQueueStore, Exception | None]:
    """Start a TransferQueue of one storage unit; also what attaching to none had said."""
    early = None
    try:
        attach()
    except ServerUnreachableError as error:
        early = error
    units = {"SimpleStorage": {"num_data_storage_units": 1}}
    transfer_queue.init({"backend": units})
    return attach(timeout=LONG), early


@pytest.fixture(scope="module")
def started(cluster: Cluster) -> Iterator[tuple[TransferQueueStore, Exception | None]]:
    store, early = make_store()
    try:
        yield store, early
    finally:
        store.close()
        transfer_queue.close()


@pytest.fixture
def store(started: tuple[TransferQueueStore, Exception | None]) -> TransferQueueStore:
    return started[0]


@pytest.fixture(scope="module")
def teacher() -> Iterator[str]:
    with testing.serve() as server:
        yield server.address


@pytest.fixture
def meta() -> RowMeta:
    return RowMeta(partition_id=next(partitions), sample_ids=NAMES, sequence_lengths=LENGTHS)


def prompts() -> dict[str, torch.Tensor]:
    return pack_jagged({"input_ids": IDS}, LENGTHS)


def some_entries(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Entries of random numbers, in half the bytes."""
    shape = (len(lengths), max(lengths), K)
    values = torch.randn(shape).to(torch.bfloat16)
    ids = torch.randint(0, V, shape, dtype=torch.int32)
    return pack_jagged({LOGITS: values, INDICES: ids}, lengths)


def rows_of(field: torch.Tensor) -> list[torch.Tensor]:
    return list(field.unbind())


def test_attaching_starts_no_queue(
    started: tuple[TransferQueueStore, Exception | None],
) -> None:
    assert "the driver calls transfer_queue.init()" in str(started[1])


def test_fields_of_rows_come_back_bit_for_bit_in_the_order_of_their_keys(
    store: TransferQueueStore,
) -> None:
    lengths = (5, 0, 2)
    meta = RowMeta(partition_id=next(partitions), sample_ids=NAMES, sequence_lengths=lengths)
    entries = some_entries(lengths)
    store.add_rows(meta, pack_jagged({"input_ids": IDS}, lengths, padded_to=5))

    store.add_fields(meta, entries)
    found = store.read(meta.take([2, 1, 0]), [INDICES, LOGITS])

    assert list(found) == [INDICES, LOGITS]
    for name, field in found.items():
        wanted = rows_of(entries[name])[::-1]
        assert all(map(torch.equal, rows_of(field), wanted)), name
        assert field.dtype is entries[name].dtype


def test_reading_by_keys_moves_no_cursor(store: TransferQueueStore, meta: RowMeta) -> None:
    store.add_rows(meta, prompts())

    store.read(meta, ["input_ids"])

    client: Any = transfer_queue.get_client()
    claimed = client.get_meta(
        data_fields=["input_ids"], batch_size=3, partition_id=meta.partition_id, task_name="train"
    )
    assert claimed.size == 3


def test_rows_of_equal_shape_come_back_dense(store: TransferQueueStore, meta: RowMeta) -> None:
    numbers = {"input_lengths": torch.tensor(LENGTHS), "per_row": torch.randn(3, 2)}
    store.add_rows(meta, {**prompts(), **numbers})

    found = store.read(meta, ["input_lengths", "per_row", "input_ids"])

    assert torch.equal(found["input_lengths"], numbers["input_lengths"])
    assert torch.equal(found["per_row"], numbers["per_row"])
    assert found["input_ids"].is_nested
    assert torch.equal(pad_jagged(found).fields["input_ids"], IDS)


class TestWhatIsNotThere:
    """TransferQueue answers all of these with fewer rows or fields."""

    def test_is_an_error_for_a_row(self, store: TransferQueueStore, meta: RowMeta) -> None:
        store.add_rows(meta.take([0, 1]), pack_jagged({"input_ids": IDS[:2]}, LENGTHS[:2]))

        with pytest.raises(RowsMissingError, match=r"1 of 3 rows are not in .*such as 'c'"):
            store.read(meta, ["input_ids"])
        with pytest.raises(RowsMissingError, match=r"1 of 3 rows"):
            store.add_fields(meta, some_entries(LENGTHS))

        assert store.sample_ids(meta.partition_id) == ("a", "b")

    def test_is_an_error_for_a_partition(self, store: TransferQueueStore, meta: RowMeta) -> None:
        with pytest.raises(RowsMissingError, match=r"3 of 3 rows"):
            store.read(meta, ["input_ids"])

        assert store.sample_ids(meta.partition_id) == ()

    def test_is_an_error_for_a_field(self, store: TransferQueueStore, meta: RowMeta) -> None:
        store.add_rows(meta, prompts())

        with pytest.raises(RowsMissingError, match=f"not every one has {LOGITS}: not written"):
            store.read(meta, ["input_ids", LOGITS])

    def test_is_an_error_for_a_field_that_some_rows_have(
        self, store: TransferQueueStore, meta: RowMeta
    ) -> None:
        store.add_rows(meta, prompts())
        store.add_fields(meta.take([0]), some_entries(LENGTHS[:1]))

        with pytest.raises(RowsMissingError, match="not every one"):
            store.read(meta, [LOGITS])

        assert store.read(meta.take([0]), [LOGITS])[LOGITS].shape == (1, 5, K)

    def test_is_an_error_for_no_field_at_all(
        self, store: TransferQueueStore, meta: RowMeta
    ) -> None:
        store.add_rows(meta, prompts())

        with pytest.raises(RowsMissingError):
            store.read(meta, [])

    def test_is_an_error_where_storage_alone_has_lost_it(
        self, store: TransferQueueStore, meta: RowMeta
    ) -> None:
        store.add_rows(meta, prompts())
        client: Any = transfer_queue.get_client()
        known = client.kv_retrieve_meta(keys=["b"], partition_id=meta.partition_id, create=False)
        client._run_coroutine(client.storage_manager.clear_data(known))

        with pytest.raises(ObjectLostError, match="could not read 1 fields of 3 rows"):
            store.read(meta, ["input_ids"])


class TestWhatIsThere:
    def test_is_not_written_again(self, store: TransferQueueStore, meta: RowMeta) -> None:
        store.add_rows(meta, prompts())
        store.add_fields(meta.take([1]), some_entries(LENGTHS[1:2]))

        with pytest.raises(PayloadConflictError, match="3 of 3 rows are in partition"):
            store.add_rows(meta, prompts())
        with pytest.raises(PayloadConflictError, match=f"1 of 3 rows .* have {LOGITS} already"):
            store.add_fields(meta, some_entries(LENGTHS))

    def test_has_one_element_type_a_field(self, store: TransferQueueStore, meta: RowMeta) -> None:
        """TransferQueue logs it, and takes the row."""
        store.add_rows(meta, prompts())
        store.add_fields(meta.take([0]), some_entries(LENGTHS[:1]))
        others = {name: each.double() for name, each in some_entries(LENGTHS[1:]).items()}

        with pytest.raises(PayloadInvalidError, match=r"as torch.float64 .* as torch.bfloat16"):
            store.add_fields(meta.take([1, 2]), others)

    def test_is_known_to_the_controller(
        self, store: TransferQueueStore, meta: RowMeta, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """TransferQueue reports a write as done of which the controller never heard."""
        store.add_rows(meta, prompts())

        async def lost(*_: object) -> None: ...

        manager = transfer_queue.get_client().storage_manager
        monkeypatch.setattr(manager, "notify_data_update", lost)
        with pytest.raises(TransportFailure, match=f"{LOGITS} of 3 rows .* never announced"):
            store.add_fields(meta, some_entries(LENGTHS))


class TestAPartition:
    def test_is_registered_without_a_row(self, store: TransferQueueStore, meta: RowMeta) -> None:
        specs = (*FORM.specs, FieldSpec(name="n", element_type=torch.int64, token_aligned=False))

        store.register(meta.partition_id, specs)
        store.register(meta.partition_id, specs)

        client: Any = transfer_queue.get_client()
        _, status = client.get_production_status([*FORM.names, "n"], meta.partition_id)
        assert status is not None, "its columns are not known"
        assert store.sample_ids(meta.partition_id) == ()

    def test_of_which_rows_have_another_type_is_not_registered(
        self, store: TransferQueueStore, meta: RowMeta
    ) -> None:
        store.add_rows(meta, prompts())
        spec = FieldSpec(name="input_ids", element_type=torch.int32)

        with pytest.raises(PayloadInvalidError, match="holds it as torch"):
            store.register(meta.partition_id, [spec])

        assert store.sample_ids(meta.partition_id) == NAMES

    @pytest.mark.parametrize("fails", [False, True])
    def test_is_used_again_after_a_step_however_it_ended(
        self, store: TransferQueueStore, meta: RowMeta, fails: bool
    ) -> None:
        def step(fails: bool) -> None:
            with cleared_at_end(store, meta):
                store.add_rows(meta, prompts())
                store.add_fields(meta, some_entries(LENGTHS))
                if fails:
                    raise KeyError("the step's own")

        if fails:
            with pytest.raises(KeyError, match="the step's own"):
                step(fails)
        step(fails=False)

        assert store.sample_ids(meta.partition_id) == ()

    def test_is_cleared_of_rows_that_are_not_there_too(
        self, store: TransferQueueStore, meta: RowMeta
    ) -> None:
        store.add_rows(meta.take([0]), pack_jagged({"input_ids": IDS[:1]}, LENGTHS[:1]))

        store.clear(meta.partition_id, meta.sample_ids)
        store.clear(meta.partition_id, meta.sample_ids)

        assert store.sample_ids(meta.partition_id) == ()


def test_a_read_that_was_given_up_gives_nobody_its_answer(
    store: TransferQueueStore, meta: RowMeta
) -> None:
    store.add_rows(meta, {**prompts(), "n": torch.arange(3)})

    with pytest.raises(DeadlinePassedError, match="read 1 fields of 3 rows"):
        store.read(meta, ["input_ids"], timeout=0.0)
    for seconds in (0.0005, 0.001, 0.002, 0.004):  # some are given up while under way
        with suppress(DeadlinePassedError):
            store.read(meta, ["input_ids"], timeout=seconds)
        assert store.read(meta, ["n"])["n"].tolist() == [0, 1, 2]


class TeacherWorker:
    """A rank of a teacher's replica: asks the served teacher, and writes into the queue."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._store = attach(timeout=LONG)

    def score(self, meta: RowMeta, is_leader: bool) -> dict[str, int | float] | None:
        grid = tl.BatchGrid(global_batch_size=3, data_parallel_size=1, micro_batch_size=3)
        profile = tl.StudentProfile(batch_grid=grid, top_k=K)
        turn = Turn(select_fields=["input_ids"], writes=FORM.specs)
        with tl.connect(self._address) as client, client.open_session(profile) as session:

            def run(rows: RankRows) -> Mapping[str, torch.Tensor]:
                asked = session.score(rows.fields["input_ids"], lengths=rows.lengths)
                with asked.result(timeout=LONG) as payload:
                    return teacher_fields(payload, rows.lengths, FORM)

            replica = IndependentReads(is_leader=is_leader)
            return run_presharded(self._store, meta, run, turn, replica=replica)


def test_a_trainer_on_the_queue_learns_from_our_server(
    store: TransferQueueStore, meta: RowMeta, teacher: str
) -> None:
    """No tensor passes through the driver; the loss is that over the server's own targets."""
    logits = torch.randn(3, 5, V)
    trainers_own = {
        "input_lengths": torch.tensor(LENGTHS),
        "token_mask": torch.arange(5) < torch.tensor(LENGTHS)[:, None],
        "sample_mask": torch.ones(3),
    }
    meta = meta.with_pad_target()
    train_fields = FORM.train_fields(["input_ids", *trainers_own])
    with cleared_at_end(store, meta):
        store.register(meta.partition_id, FORM.specs)
        store.add_rows(meta, pack_jagged({"input_ids": IDS, **trainers_own}, LENGTHS))
        worker: Any = ray.remote(num_cpus=0)(TeacherWorker).remote(teacher)
        parts = [(meta.slice(0, 2), True), (meta.slice(0, 2), False), (meta.slice(2, 3), True)]
        replies = ray.get([worker.score.remote(*part) for part in parts], timeout=LONG)
        report = join_replies(replies)
        batch = pad_jagged(store.read(meta, train_fields), pad_to_seqlen=meta.pad_to_seqlen).fields
        direct = direct_loss(teacher, logits)

    mask = nemo_rl.position_mask(batch)
    loss_sum, count = tl.losses.forward_kl(logits, nemo_rl.to_targets(batch), mask)
    assert (report.rows, report.write_bytes) == (3, sum(LENGTHS) * (K * 12 + 4))
    assert replies[1] is None
    assert count == sum(LENGTHS) - 3
    assert torch.allclose(loss_sum, direct, rtol=1e-6)
    assert store.sample_ids(meta.partition_id) == ()


def direct_loss(address: str, logits: torch.Tensor) -> torch.Tensor:
    """The loss of a student of the server that has no queue between them."""
    grid = tl.BatchGrid(global_batch_size=3, data_parallel_size=1, micro_batch_size=3)
    profile = tl.StudentProfile(batch_grid=grid, top_k=K)
    with tl.connect(address) as client, client.open_session(profile) as session:
        with session.score(IDS, lengths=torch.tensor(LENGTHS)).result() as payload:
            loss_sum, _ = tl.losses.forward_kl(logits, payload.targets)
            return loss_sum.clone()


def test_the_example_learns(store: TransferQueueStore, teacher: str) -> None:
    losses = runpy.run_path(str(ROOT / "examples" / "queue_trainer.py"))["main"](teacher)

    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert store.sample_ids("train") == ()


def test_the_page_runs_as_it_is_shown(store: TransferQueueStore, teacher: str) -> None:
    page = (ROOT / "docs" / "data_plane.md").read_text(encoding="utf-8")
    snippet = page.split("```python\n")[1].split("```")[0]
    grid = tl.BatchGrid(global_batch_size=2, data_parallel_size=1, micro_batch_size=2)
    profile = tl.StudentProfile(batch_grid=grid, top_k=K)
    with tl.connect(teacher) as client, client.open_session(profile) as session:
        names: dict[str, Any] = {"session": session, "input_ids": IDS[:2]}
        exec(compile(snippet, "data_plane.md", "exec"), names)

    assert names["reply"]["rows"] == 2
    assert names["batch"].fields[INDICES].shape == (2, 5, K)
    assert store.sample_ids("train") == ()


def test_verls_own_keys_travel_as_they_are(
    store: TransferQueueStore, meta: RowMeta, teacher: str
) -> None:
    lengths = torch.tensor(LENGTHS)
    grid = tl.BatchGrid(global_batch_size=3, data_parallel_size=1, micro_batch_size=3)
    profile = tl.StudentProfile(batch_grid=grid, top_k=K)
    with tl.connect(teacher) as client, client.open_session(profile) as session:
        with session.score(IDS, lengths=lengths).result(timeout=LONG) as payload:
            own = verl.to_batch(payload.targets, lengths, with_tail=True)
    store.add_rows(meta, prompts())

    store.add_fields(meta, own)

    found, wanted = (verl.to_targets(each) for each in (store.read(meta, list(own)), own))
    assert torch.equal(found.topk_ids, wanted.topk_ids)
    assert torch.equal(found.topk_logprobs, wanted.topk_logprobs)


def test_fields_of_other_rows_or_none_are_not_written(
    store: TransferQueueStore, meta: RowMeta
) -> None:
    store.add_rows(meta, prompts())

    with pytest.raises(PayloadInvalidError, match="n has 2 rows and there are 3"):
        store.add_fields(meta, {"n": torch.arange(2)})
    with pytest.raises(PayloadInvalidError, match="no field of 3 rows"):
        store.add_fields(meta, {})


def test_tags_stay_with_their_rows(store: TransferQueueStore, meta: RowMeta) -> None:
    tags = tuple({"teacher": number} for number in range(3))
    store.add_rows(replace(meta, tags=tags), prompts())

    store.add_fields(meta, some_entries(LENGTHS))

    found = transfer_queue.kv_list(meta.partition_id)[meta.partition_id]
    assert [found[name] for name in NAMES] == list(tags)


def test_a_store_that_is_closed_leaves_the_queue_to_the_others(
    store: TransferQueueStore, meta: RowMeta
) -> None:
    with attach(timeout=LONG) as other:
        other.add_rows(meta, prompts())

    assert store.sample_ids(meta.partition_id) == NAMES


def test_the_tail_travels_too(store: TransferQueueStore, meta: RowMeta) -> None:
    tail = {TAIL: torch.randn(3, 5)}
    store.add_rows(meta, prompts())

    store.add_fields(meta, pack_jagged(tail, LENGTHS))

    padded = pad_jagged(store.read(meta, [TAIL]))
    assert torch.equal(padded.fields[TAIL][padded.mask], tail[TAIL][padded.mask])


def kill_controller() -> None:
    """Kill it, and see that nobody listens any more: a killed actor goes on for a moment."""
    info = transfer_queue.get_client()._controller
    there = (info.ip, int(info.ports["request_handle_socket"]))
    ray.kill(ray.get_actor("TransferQueueController", namespace="transfer_queue"))
    until = time.monotonic() + LONG
    with suppress(ConnectionRefusedError):
        while time.monotonic() < until:
            socket.create_connection(there, timeout=LONG).close()


def test_nobody_waits_for_a_queue_that_is_gone(store: TransferQueueStore, meta: RowMeta) -> None:
    """The last of this file: there is no queue behind it."""
    store.add_rows(meta, prompts())
    kill_controller()

    with pytest.raises(DeadlinePassedError, match="its controller or a storage unit is gone"):
        store.read(meta, ["input_ids"], timeout=0.2)
    with (
        pytest.raises(StepNotClearedError, match=r"KeyError: 'own'.*DeadlinePassedError: waited"),
        cleared_at_end(store, meta, timeout=0.2),
    ):
        raise KeyError("own")
