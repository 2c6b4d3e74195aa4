"""A rank's turn, over a store that is a dictionary."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
import torch

from teacher_logits.errors import PayloadInvalidError, TransportFailure
from teacher_logits_client.data_plane.fields import ABSENT_ID, FieldSpec, TopKForm
from teacher_logits_client.data_plane.jagged import nest, pack_jagged
from teacher_logits_client.data_plane.padded import make_dense
from teacher_logits_client.data_plane.presharded import (
    IndependentReads,
    RankRows,
    Turn,
    run_presharded,
)
from teacher_logits_client.data_plane.row_meta import RowMeta
from teacher_logits_client.data_plane.row_store import StepNotClearedError, cleared_at_end
from teacher_logits_client.data_plane.write_back import WriteReport, join_replies
from teacher_logits_client.trainers.nemo_rl import INDICES, LOGITS, TAIL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

K = 2
FORM = TopKForm(k=K)
META = RowMeta(partition_id="step", sample_ids=("a", "b"), sequence_lengths=(3, 1))
TURN = Turn(select_fields=("input_ids",), writes=FORM.specs)


@dataclass
class Rows:
    """A store of one batch of rows, which counts what is asked of it."""

    fields: dict[str, torch.Tensor] = field(default_factory=dict)
    reads: list[tuple[str, ...]] = field(default_factory=list)
    cleared: list[tuple[str, ...]] = field(default_factory=list)
    fails: bool = False

    def add_fields(
        self, meta: RowMeta, fields: Mapping[str, torch.Tensor], *, timeout: float
    ) -> None:
        self.fields |= fields

    def read(
        self, meta: RowMeta, select_fields: Sequence[str], *, timeout: float
    ) -> dict[str, torch.Tensor]:
        self.reads.append(tuple(select_fields))
        return make_dense({name: self.fields[name] for name in select_fields})

    def clear(self, partition_id: str, sample_ids: Sequence[str], *, timeout: float) -> None:
        self.cleared.append(tuple(sample_ids))
        if self.fails:
            raise TransportFailure("storage is gone")


def a_store() -> Rows:
    ids = {"input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]), "advantages": torch.zeros(2, 3)}
    return Rows(fields=pack_jagged(ids, META.sequence_lengths))


def answer(rows: RankRows) -> dict[str, torch.Tensor]:
    """What a teacher gives, padded as what it ran on; of the tokens, so that they are told."""
    ids = rows.fields["input_ids"]
    return {
        LOGITS: ids.float().unsqueeze(-1).expand(*ids.shape, K).contiguous(),
        INDICES: ids.unsqueeze(-1).expand(*ids.shape, K).contiguous(),
        TAIL: torch.zeros(ids.shape),
    }


def test_rows_are_read_by_name_run_and_written_without_their_padding() -> None:
    store, seen = a_store(), []
    meta = META.with_pad_target(4)

    def run(rows: RankRows) -> dict[str, torch.Tensor]:
        seen.append(rows)
        return answer(rows)

    run_presharded(store, meta, run, TURN)

    assert store.reads == [("input_ids",)]
    assert set(seen[0].fields) == {"input_ids"}
    assert seen[0].mask.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert [row.tolist() for row in store.fields[LOGITS].unbind()] == [
        [[1, 1], [2, 2], [3, 3]],
        [[4, 4]],
    ]


def test_the_reply_is_the_bytes_by_the_rule_and_no_tensor() -> None:
    reply = run_presharded(a_store(), META.with_pad_target(4), answer, TURN)

    entry = 4 + 8  # fp32 and int64
    assert reply is not None
    assert reply["rows"] == 2
    assert reply["payload_bytes"] == 2 * 4 * (K * entry + 4)
    assert reply["valid_token_bytes"] == reply["write_bytes"] == (3 + 1) * (K * entry + 4)
    assert reply["padding_bytes"] == reply["payload_bytes"] - reply["valid_token_bytes"]
    assert reply["write_ms"] > 0
    assert all(type(each) in (int, float) for each in reply.values())


def test_a_nested_answer_has_no_padding() -> None:
    def run(rows: RankRows) -> dict[str, torch.Tensor]:
        return pack_jagged(answer(rows), rows.lengths, padded_to=rows.mask.shape[1])

    reply = run_presharded(a_store(), META.with_pad_target(4), run, TURN)

    assert reply is not None
    assert reply["padding_bytes"] == 0


def test_one_number_a_row_has_no_padding_either() -> None:
    score = FieldSpec(name="score", element_type=torch.float32, token_aligned=False)

    reply = run_presharded(
        a_store(), META, lambda _: {"score": torch.ones(2)}, replace(TURN, writes=[score])
    )

    assert reply is not None
    assert reply["payload_bytes"] == reply["valid_token_bytes"] == reply["write_bytes"] == 8


def test_an_answer_with_more_padding_than_what_was_read_is_cut_where_that_is_stated() -> None:
    def run(rows: RankRows) -> dict[str, torch.Tensor]:
        made = answer(rows)
        return {name: torch.cat([each, each], 1) for name, each in made.items()}

    reply = run_presharded(a_store(), META, run, replace(TURN, padded_to=6))

    assert reply is not None
    assert reply["valid_token_bytes"] == reply["write_bytes"]
    with pytest.raises(PayloadInvalidError, match="6 tokens wide"):
        run_presharded(a_store(), META, run, TURN)


def test_only_the_leader_of_a_replica_writes() -> None:
    store, runs = a_store(), []

    def run(rows: RankRows) -> dict[str, torch.Tensor]:
        runs.append(rows)
        return answer(rows)

    reply = run_presharded(store, META, run, TURN, replica=IndependentReads(is_leader=False))

    assert reply is None
    assert len(runs) == 1
    assert LOGITS not in store.fields


def test_the_drivers_plan_comes_along_and_its_lack_is_an_error() -> None:
    plan, seen = {"bins": ((0, 1),)}, []
    turn = replace(TURN, needs_plan=True)

    def run(rows: RankRows) -> dict[str, torch.Tensor]:
        seen.append(rows.plan)
        return answer(rows)

    run_presharded(a_store(), replace(META, plan=plan), run, turn)
    store = a_store()
    with pytest.raises(PayloadInvalidError, match="no plan came with them"):
        run_presharded(store, META, run, turn)

    assert seen == [plan]
    assert store.reads == []


def changed(**fields: object) -> object:
    rows = RankRows(
        meta=META,
        fields={"input_ids": torch.zeros(2, 3, dtype=torch.int64)},
        lengths=torch.tensor([3, 1]),
        mask=torch.ones(2, 3),
        plan=None,
    )
    made = {**answer(rows), **fields}
    return {name: each for name, each in made.items() if each is not None}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([torch.zeros(2)], "the answer is a list"),
        (changed(**{TAIL: None}), "lacks teacher_log_tail; promised"),
        (changed(more=torch.zeros(2)), "has more; promised"),
        (changed(**{TAIL: [0.0]}), "teacher_log_tail is a list"),
        (changed(**{TAIL: torch.zeros(3, 3)}), "has 3 rows and there are 2 sample ids"),
        (changed(**{LOGITS: torch.zeros(2, 3, 5)}), r"\(5,\) behind its rows and tokens and \(2,"),
        (changed(**{TAIL: torch.zeros(2, 3, 1)}), r"\(1,\) behind its rows and tokens and \(\)"),
        (changed(**{LOGITS: nest(torch.zeros(4, 5), torch.tensor([3, 1]))}), r"\(5,\) behind"),
        (changed(**{INDICES: torch.zeros(2, 3, 2)}), "is torch.float32 and torch.int64 was"),
        (changed(**{TAIL: torch.zeros(2, 2)}), "2 tokens wide and the longest row has 3"),
    ],
)
def test_an_answer_that_was_not_promised_is_not_written(given: object, told: str) -> None:
    store = a_store()

    with pytest.raises(PayloadInvalidError, match=told):
        run_presharded(store, META, lambda _: given, TURN)  # type: ignore[arg-type, return-value]

    assert set(store.fields) == {"input_ids", "advantages"}


def test_rows_that_are_not_as_long_as_their_metadata_says_are_not_run() -> None:
    meta = replace(META, sequence_lengths=(3, 2))

    with pytest.raises(PayloadInvalidError, match="row 1 of input_ids has 1 tokens"):
        run_presharded(a_store(), meta, answer, TURN)


@pytest.mark.parametrize("wrong", [{"select_fields": ()}, {"select_fields": "ids"}, {"writes": ()}])
def test_what_is_read_and_written_has_to_be_named(wrong: dict[str, object]) -> None:
    with pytest.raises(PayloadInvalidError, match="name each field"):
        replace(TURN, **wrong)  # type: ignore[arg-type]


def test_a_turn_names_an_absent_id_at_padding() -> None:
    store = a_store()
    run_presharded(store, META, answer, TURN)

    def student(rows: RankRows) -> dict[str, torch.Tensor]:
        assert (rows.fields[INDICES][~rows.mask] == ABSENT_ID).all()
        return {"prev_logprobs": torch.zeros(rows.mask.shape)}

    prev = FieldSpec(name="prev_logprobs", element_type=torch.float32)
    turn = Turn(select_fields=FORM.train_fields(["input_ids"]), writes=[prev])
    run_presharded(store, META, student, turn)

    assert "prev_logprobs" in store.fields


class TestReplies:
    def report(self, *, rows: int, ms: float) -> dict[str, int | float]:
        made = WriteReport(
            rows=rows,
            payload_bytes=10 * rows,
            valid_token_bytes=6 * rows,
            padding_bytes=4 * rows,
            write_bytes=6 * rows,
            write_ms=ms,
        )
        return made.scalars()

    def test_are_summed_and_the_slowest_told(self) -> None:
        step = join_replies([self.report(rows=2, ms=5.0), None, self.report(rows=1, ms=7.0)])

        assert (step.rows, step.payload_bytes, step.valid_token_bytes) == (3, 30, 18)
        assert (step.padding_bytes, step.write_bytes) == (12, 18)
        assert (step.write_ms_sum, step.write_ms_max) == (12.0, 7.0)
        assert step.driver_avoided_bytes == 60

    @pytest.mark.parametrize(
        "change", [{"write_ms": torch.zeros(1)}, {"extra": 1}, {"rows": True}, {"rows": "2"}]
    )
    def test_with_a_tensor_or_anything_but_the_numbers_are_an_error(
        self, change: dict[str, object]
    ) -> None:
        with pytest.raises(PayloadInvalidError, match="and no tensor"):
            join_replies([self.report(rows=1, ms=1.0) | change])


class TestAStepsEnd:
    def test_clears_its_rows(self) -> None:
        store = a_store()

        with cleared_at_end(store, META):
            assert store.cleared == []

        assert store.cleared == [("a", "b")]

    @pytest.mark.parametrize("error", [KeyError("own"), KeyboardInterrupt()])
    def test_clears_them_after_a_failure_too_which_comes_through(
        self, error: BaseException
    ) -> None:
        store = a_store()

        with pytest.raises(type(error)) as caught, cleared_at_end(store, META):
            raise error

        assert caught.value is error
        assert store.cleared == [("a", "b")]

    def test_tells_of_both_where_they_could_not_be_cleared_after_a_failure(self) -> None:
        failure = KeyError("own")

        with (
            pytest.raises(StepNotClearedError, match=r"KeyError: 'own'.*storage is gone") as caught,
            cleared_at_end(Rows(fails=True), META),
        ):
            raise failure

        assert caught.value.cause is caught.value.__cause__ is failure
        assert isinstance(caught.value.cleanup, TransportFailure)

    def test_tells_of_it_where_nothing_else_had_failed(self) -> None:
        with (
            pytest.raises(StepNotClearedError, match=r"^2 rows of partition step") as caught,
            cleared_at_end(Rows(fails=True), META),
        ):
            pass

        assert caught.value.cause is None

    def test_lets_an_interrupt_through_whatever_becomes_of_the_rows(self) -> None:
        with pytest.raises(KeyboardInterrupt), cleared_at_end(Rows(fails=True), META):
            raise KeyboardInterrupt
