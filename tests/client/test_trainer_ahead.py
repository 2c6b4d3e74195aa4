"""Batches that are read ahead, and a served teacher that is asked before it is waited for."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

import teacher_logits_client as tl
from teacher_logits.errors import ConfigError, RequestInvalidError
from teacher_logits_client import testing
from teacher_logits_client.trainers.asked_ahead import EvaluationBatches, ReadAhead
from teacher_logits_client.trainers.batch_rows import BatchRows, padded_rows
from teacher_logits_client.trainers.objective import Objective
from teacher_logits_client.trainers.on_policy import Coin, continue_prompts, prompts_of
from teacher_logits_client.trainers.served_teacher import Request, ServedTeacher, TeacherSettings

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_batches_come_in_order_and_some_are_read_ahead() -> None:
    read: list[int] = []

    def prepare(number: int) -> str:
        read.append(number)
        return str(number)

    ahead: ReadAhead[int, str] = ReadAhead(iter(range(7)), prepare, ahead=2)

    assert ahead.take(2) == ["0", "1"]
    assert read == [0, 1, 2, 3]
    assert ahead.take(2) == ["2", "3"]
    assert ahead.left == []
    assert ahead.take(3) == ["4", "5", "6"]
    assert ahead.take(1) == []
    assert read == list(range(7))


def test_batches_too_few_for_a_step_are_left_for_the_next_epoch() -> None:
    first: ReadAhead[int, int] = ReadAhead(iter([1, 2, 3]), abs, ahead=1)

    assert first.take(2) == [1, 2]
    assert first.take(2) == []
    second: ReadAhead[int, int] = ReadAhead(iter([4, 5, 6]), abs, ahead=1, first=first.left)
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


@pytest.fixture(scope="module")
def teacher() -> Iterator[str]:
    with testing.serve() as server:
        yield server.address


def rows_of_one(token: int) -> BatchRows:
    ids = torch.tensor([[token, token + 1, token + 2]])
    return padded_rows(ids, None, torch.ones_like(ids, dtype=torch.bool))


def served(address: str, ahead: int) -> ServedTeacher:
    grid = tl.BatchGrid(global_batch_size=1, data_parallel_size=1, micro_batch_size=1)
    return ServedTeacher(
        TeacherSettings(address=address, ahead=ahead),
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
    ranks = [[Coin(0.3, seed=5).toss() for _ in range(1)] for _ in range(2)]
    coin = Coin(0.3, seed=5)
    tosses = [coin.toss() for _ in range(2000)]

    assert ranks[0] == ranks[1] == tosses[:1]
    assert 500 < sum(tosses) < 700
    assert not any(Coin(0.0, seed=0).toss() for _ in range(99))
    assert all(Coin(1.0, seed=0).toss() for _ in range(99))


def test_a_prompt_is_what_stands_in_front_of_the_first_label() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [0, 0, 5, 6]])
    tokens = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    labels = torch.tensor([[-100, -100, 3, 4], [-100] * 4])

    found = prompts_of(ids, tokens, labels)

    assert [each.tolist() for each in found] == [[1, 2], [5, 6]]
    with pytest.raises(ConfigError, match="row 0 has labels from its first token on"):
        prompts_of(ids, tokens, ids)


class Parrot:
    """A model that says 7 and then the end, 9, whatever it was asked."""

    training = True

    def generate(self, **given: object) -> torch.Tensor:
        ids = given["input_ids"]
        assert isinstance(ids, torch.Tensor)
        assert not self.training
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
        settings={},
    )

    assert made["input_ids"].tolist() == [[1, 2, 7, 9], [4, 7, 9, 0]]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert made["labels"].tolist() == [[-100, -100, 7, 9], [-100, 7, 9, -100]]
    assert model.training
