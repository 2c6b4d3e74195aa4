"""A head sharded over real ranks: each has the selection of the whole vocabulary.

The processes run once for all tests; each test reads what every rank said.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
from tests.processes.gloo_ranks import Said, said_by_ranks
from tests.processes.selecting import RANKS, TEMPERATURES, VOCABULARY, K, logits, next_ids

from teacher_logits.selection import Selection, select_top_k


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    """What each rank found."""
    return said_by_ranks("tests.processes.selecting", RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def plain() -> Selection:
    """What one process selects of the whole head."""
    return select_top_k(
        logits(), k=K, temperatures=TEMPERATURES, vocab_size=VOCABULARY, next_ids=next_ids()
    )


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_rank_has_the_ids_of_the_whole_vocabulary(
    said: list[Said], plain: Selection, rank: int
) -> None:
    assert said[rank]["ids"] == plain.topk_ids.tolist()
    assert said[rank]["status"] == plain.status.tolist()


def test_every_rank_has_its_log_probabilities_tails_and_normalisers(
    said: list[Said], plain: Selection
) -> None:
    assert plain.actual_logprob is not None
    expected = (plain.topk_logprobs, plain.log_tail, plain.logsumexp, plain.actual_logprob)
    for found in said:
        for numbers, tensor in zip(cast("list[object]", found["numbers"]), expected, strict=True):
            torch.testing.assert_close(
                torch.tensor(numbers), tensor.flatten(), atol=2e-6, rtol=1e-5
            )


def test_all_ranks_have_the_same_bits(said: list[Said]) -> None:
    assert all(found["numbers"] == said[0]["numbers"] for found in said)


def test_a_rank_that_disagrees_is_named_by_all_and_nobody_waits(said: list[Said]) -> None:
    for found in said:
        assert found["refusals"] == [
            "3 k",
            "3 temperatures",
            "3 next_ids",
            "3 sum_of_next_ids",
        ]


def test_ranks_of_a_group_merge_their_own_ids(said: list[Said]) -> None:
    assert [found.get("pair") for found in said] == [[[0, 60]], [[0, 60]], None, None]
