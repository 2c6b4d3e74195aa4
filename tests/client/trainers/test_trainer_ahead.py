"""Batches that are read ahead, and a served teacher that is asked before it is waited for."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError, RequestInvalidError
from teacher_logits_client.trainers.asked_ahead import EvaluationBatches, ReadAhead
from teacher_logits_client.trainers.batch_rows import BatchRows, padded_rows
from teacher_logits_client.trainers.objective import Objective
from teacher_logits_client.trainers.on_policy import (
    Coin,
    continue_prompts,
    prompts_of,
    sampling_seed,
)
from teacher_logits_client.trainers.served_teacher import Request, ServedTeacher, TeacherSettings
from teacher_logits_client.trainers.teacher_batches import micro_batches_before
from teacher_logits_client.trainers.wrapping import data_rank, without_repeats

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_batches_come_in_order_and_some_are_read_ahead() -> None:
    read: list[int] = []

    def prepare(number: int) -> str:
        read.append(number)
        return str(number)

    ahead: ReadAhead[int, str] = ReadAhead(iter(range(7)), prepare, ahead=2, is_stream=True)

    assert ahead.take(2) == ["0", "1"]
    assert read == [0, 1, 2, 3]
    assert ahead.take(2) == ["2", "3"]
    assert ahead.left == []
    assert ahead.take(3) == ["4", "5", "6"]
    assert ahead.take(1) == []
    assert read == list(range(7))


def test_the_last_step_of_an_epoch_has_what_is_left_of_it() -> None:
    """Older trainers that resume in an epoch ask for a whole step there all the same."""
    rest: ReadAhead[int, int] = ReadAhead(iter([5]), abs, ahead=1, is_stream=False)

    assert [rest.take(2), rest.take(2), rest.left] == [[5], [], []]


def test_batches_of_a_stream_too_few_for_a_step_are_left_for_the_next_epoch() -> None:
    first: ReadAhead[int, int] = ReadAhead(iter([1, 2, 3]), abs, ahead=1, is_stream=True)

    assert first.take(2) == [1, 2]
    assert first.take(2) == []
    second: ReadAhead[int, int] = ReadAhead(
        iter([4, 5, 6]), abs, ahead=1, is_stream=True, first=first.left
    )
    assert [second.take(2), second.take(2), second.take(2)] == [[3, 4], [5, 6], []]


class Loader:
    """A loader as accelerate makes them: it says when the last batch is in use."""

    end_of_dataloader = False
    dataset = "rows"

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.was_tidied = False

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[int]:
        self.end_of_dataloader = False
        for number in range(self.batches):
            self.end_of_dataloader = number == self.batches - 1
            yield number
        self.was_tidied = True


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_the_end_of_a_loader_is_that_of_the_batch_in_use(ahead: int) -> None:
    loader = Loader(4)
    batches: EvaluationBatches[int, tuple[int, bool]] = EvaluationBatches(
        loader, lambda number, is_last: (number, is_last), ahead=ahead
    )

    found = [(*each, loader.end_of_dataloader) for each in batches]

    ends = [(number, number == 3, number == 3) for number in range(4)]
    assert found == ends
    assert loader.was_tidied
    assert (len(batches), batches.dataset) == (4, "rows")


def test_a_loader_that_says_nothing_of_its_end_is_read_to_it() -> None:
    batches: EvaluationBatches[int, int] = EvaluationBatches([1, 2, 3], lambda n, _: n, ahead=1)

    assert list(batches) == [1, 2, 3]


# --- the teacher


def rows_of_one(token: int) -> BatchRows:
    ids = torch.tensor([[token, token + 1, token + 2]])
    return padded_rows(ids, None, torch.ones_like(ids, dtype=torch.bool))


def served(address: str, ahead: int) -> ServedTeacher:
    grid = tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
    return ServedTeacher(
        lambda: TeacherSettings(address=address, ahead=ahead),
        lambda: tl.StudentProfile(batch_grid=grid, top_k=4),
    )


def sent(requests: list[Request]) -> list[bool]:
    return [each.future is not None for each in requests]


def test_those_shortly_behind_a_request_are_sent_with_it(teacher: str) -> None:
    with served(teacher, ahead=2) as it:
        requests = [it.plan(rows_of_one(token)) for token in range(6)]
        assert sent(requests) == [False] * 6
        it.send(requests[0])
        assert sent(requests) == [True] * 3 + [False] * 3
        with it.targets(requests[1]) as targets:
            assert targets.topk_ids.shape == (2, 4)  # a last token has nothing behind it
        assert sent(requests) == [True, False, True, True, False, False]
        assert it.waited_seconds > 0


def test_a_request_that_nobody_will_use_is_not_sent(teacher: str) -> None:
    with served(teacher, ahead=2) as it:
        numbers: list[int] = []
        send = it._send

        def sending(request: Request) -> None:
            numbers.append(request.number)
            send(request)

        it._send = sending  # type: ignore[method-assign]
        gone = it.plan(rows_of_one(1))
        kept = it.plan(rows_of_one(2))
        del gone
        gc.collect()
        with it.targets(kept):
            pass
        assert set(numbers) == {kept.number}


def test_targets_end_with_their_block_and_come_once(teacher: str) -> None:
    with served(teacher, ahead=0) as it:
        request = it.plan(rows_of_one(1))
        with it.targets(request) as targets:
            pass
        with pytest.raises(tl.errors.LeaseLostError):
            targets.check_open()
        with pytest.raises(RequestInvalidError, match="was used, or not sent"):
            request.take()


def test_a_teacher_may_be_entered_inside_itself(teacher: str) -> None:
    with served(teacher, ahead=0) as it:
        session = it.session
        with it:
            assert it.session is session
        assert it.session is session
    with pytest.raises(RequestInvalidError, match="outside of train"):
        _ = it.session


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="teacher_server is not given"):
        TeacherSettings(address=None)
    with pytest.raises(ConfigError, match="beta is nan"):
        Objective(beta=float("nan"))
    with pytest.raises(ConfigError, match="temperature is inf"):
        Objective(temperature=float("inf"))


# --- on-policy


def test_a_coin_falls_alike_on_every_rank_and_as_often_as_told() -> None:
    coin = Coin(0.3, seed=5)
    tosses = [coin.toss(number) for number in range(2000)]

    assert 500 < sum(tosses) < 700
    assert [coin.toss(number) for number in (1999, 7, 7)] == [tosses[1999], tosses[7], tosses[7]]
    assert [Coin(0.3, seed=-6).toss(number) for number in range(2000)] != tosses
    assert not any(Coin(0.0, seed=0).toss(number) for number in range(99))
    assert all(Coin(1.0, seed=0).toss(number) for number in range(99))


def test_each_rank_samples_each_of_its_batches_by_a_seed_of_its_own() -> None:
    seeds = [sampling_seed(5, rank=rank, number=each) for rank in range(8) for each in range(50)]

    assert len(set(seeds)) == len(seeds)
    assert seeds[:50] == [sampling_seed(5, rank=0, number=number) for number in range(50)]


@given(an_epoch=st.integers(1, 12), accumulation=st.integers(1, 5), epochs=st.integers(1, 3))
def test_a_step_of_any_epoch_knows_how_many_batches_were_before_it(
    an_epoch: int, accumulation: int, epochs: int
) -> None:
    """An epoch's last step takes those that are left of it."""
    step = taken = 0
    for _ in range(epochs):
        for first in range(0, an_epoch, accumulation):
            assert micro_batches_before(step, accumulation=accumulation, an_epoch=an_epoch) == taken
            step, taken = step + 1, taken + min(accumulation, an_epoch - first)
    assert micro_batches_before(step, accumulation=accumulation, an_epoch=None) == (
        step * accumulation
    )


def test_a_prompt_is_what_stands_in_front_of_the_first_label() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [0, 0, 5, 6], [7, 8, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]),
        "labels": torch.tensor([[-100, -100, 3, 4], [-100] * 4, [-100, 8, -100, -100]]),
    }

    assert [each.tolist() for each in prompts_of(batch)] == [[1, 2], [5, 6], [7]]
    with pytest.raises(ConfigError, match="row 0 has labels from its first token on"):
        prompts_of({**batch, "labels": batch["input_ids"]})


def test_each_row_of_a_packed_line_has_a_prompt() -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 5, 6, 7]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        "labels": torch.tensor([[-100, 2, 3, -100, -100, 7]]),
    }

    assert [each.tolist() for each in prompts_of(batch)] == [[1], [5, 6]]


class Parrot:
    """A model that says 7 and then the end, 9, whatever it was asked."""

    training = True
    generation_config: object = None

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def generate(self, **given: object) -> torch.Tensor:
        ids = given["input_ids"]
        assert isinstance(ids, torch.Tensor)
        assert not self.training
        self.drawn.append(float(torch.rand(1)))
        return torch.cat([ids, torch.tensor([[7, 9, 3]]).expand(len(ids), 3)], 1)

    def train(self, mode: bool = True) -> object:
        self.training = mode
        return self


def test_a_completion_ends_with_its_end_and_alone_is_learnt() -> None:
    model = Parrot()

    made = continue_prompts(
        model,
        [torch.tensor([1, 2]), torch.tensor([4])],
        device=torch.device("cpu"),
        pad_id=0,
        end_ids=[9],
        seed=3,
        settings={},
    )

    assert made["input_ids"].tolist() == [[1, 2, 7, 9], [4, 7, 9, 0]]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert made["labels"].tolist() == [[-100, -100, 7, 9], [-100, 7, 9, -100]]
    assert model.training


def test_sampling_leaves_the_trainings_own_chance_where_it_is() -> None:
    model = Parrot()
    before = torch.get_rng_state()
    for seed in (3, 4, 3, 5):
        continue_prompts(
            model,
            [torch.tensor([1])],
            device=torch.device("cpu"),
            pad_id=0,
            end_ids=[9],
            seed=seed,
            settings={},
        )

    assert torch.equal(torch.get_rng_state(), before)
    assert model.drawn[0] == model.drawn[2] != model.drawn[1]


# --- ranks


@pytest.mark.parametrize(
    ("ranks", "remainder", "counted"), [(2, 3, [2, 1]), (2, 1, [1, 0]), (2, 0, [2, 2]), (1, 1, [2])]
)
def test_rows_that_fill_up_the_last_batch_of_an_evaluation_count_nowhere(
    ranks: int, remainder: int, counted: list[int]
) -> None:
    ids = torch.tensor([[1, 2], [3, 4]])
    rows = padded_rows(ids, None, torch.ones_like(ids, dtype=torch.bool))
    found = []
    for rank in range(ranks):
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(world_size=ranks, process_index=rank),
            accelerator=SimpleNamespace(gradient_state=SimpleNamespace(remainder=remainder)),
        )
        found.append(int(without_repeats(trainer, rows).mask.sum()))

    assert found == counted


def test_ranks_that_share_a_batch_are_one_to_whoever_draws_for_it() -> None:
    """Tensor-parallel ones compute one step together, and would generate apart."""
    found = []
    for rank in range(4):
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(process_index=rank), get_tp_size=lambda: 2
        )
        found.append(data_rank(trainer))

    assert found == [0, 0, 1, 1]
