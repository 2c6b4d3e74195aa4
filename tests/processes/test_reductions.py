"""Normalising over a step by processes that really reduce: gloo, two and four ranks, one idle.

The processes run once for all tests; each test reads what every rank said.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
from tests.processes.gloo_ranks import Said, said_by_ranks
from tests.processes.reducing import (
    RANKS,
    UNEVEN,
    a_model,
    flat,
    sum_and_count,
    tokens,
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    """What each rank found, by story."""
    return said_by_ranks("tests.processes.reducing", RANKS, tmp_path_factory.mktemp("ranks"))


def numbers(found: Said, story: str) -> dict[str, float | list[float]]:
    """What a rank found in a story about a step."""
    return cast("dict[str, float | list[float]]", found[story])


def monolithic(ranks: int) -> tuple[float, float, list[float]]:
    """The mean, the count and the gradient of all ranks' tokens at once."""
    model = a_model()
    batches = [
        tokens(rank, number, count)
        for rank, counts in enumerate(UNEVEN[ranks])
        for number, count in enumerate(counts)
    ]
    features = torch.cat([each for each, _ in batches])
    loss_sum, count = sum_and_count(model, features, torch.cat([mask for _, mask in batches]))
    (loss_sum / count).backward()
    return float((loss_sum / count).detach()), float(count), flat(model)


@pytest.mark.parametrize(
    ("story", "ranks"), [("two", 2), ("four", 4), ("averaged", 4), ("retried", 4)]
)
def test_every_rank_has_the_mean_and_the_gradient_of_the_whole_step(
    said: list[Said], story: str, ranks: int
) -> None:
    mean, count, gradient = monolithic(ranks)

    for each in said[:ranks]:
        found = numbers(each, story)
        assert found["mean"] == pytest.approx(mean, rel=1e-12)
        assert (found["count"], found["ranks"]) == (count, ranks)
        assert found["gradient"] == pytest.approx(gradient, rel=1e-12)


def test_a_step_that_was_aborted_and_done_again_is_bitwise_the_same(said: list[Said]) -> None:
    for found in said:
        assert numbers(found, "retried") == {**numbers(found, "four"), "attempt": 1}


def test_nothing_that_counts_leaves_gradients_of_0_and_finite_numbers(said: list[Said]) -> None:
    expected = {"mean": 0.0, "count": 0.0, "ranks": 4, "gradient": [0.0] * 4, "should_step": False}

    assert [found["nothing"] for found in said] == [expected] * RANKS


def test_ranks_that_are_at_different_steps_hear_of_it_together(said: list[Said]) -> None:
    assert [found["disagreeing"] for found in said] == ["REQUEST_INVALID"] * RANKS


def test_ranks_whose_losses_have_other_bins_hear_of_it_together(said: list[Said]) -> None:
    assert [found["other bins"] for found in said] == ["REQUEST_INVALID"] * RANKS
    assert [found["many more bins"] for found in said] == ["REQUEST_INVALID"] * RANKS


def test_more_bins_than_one_reduction_has_room_for_are_summed_alike(said: list[Said]) -> None:
    assert [found["as many bins"] for found in said] == [[0.0, 299.0 * (0 + 1 + 2 + 3)]] * RANKS


def test_ranks_hear_of_one_that_names_another_models_parameters(said: list[Said]) -> None:
    assert [found["another model"] for found in said] == ["1"] * RANKS


def test_a_group_is_one_that_the_rank_is_in(said: list[Said]) -> None:
    for rank, found in enumerate(said):
        of_two, of_a_list = cast("list[str]", found["no groups"])
        assert of_two == "a member" if rank < 2 else f"rank {rank} of 4 is not in" in of_two
        assert "the group is a list; give one that" in of_a_list


def test_the_gradient_norm_is_that_of_all_owners_on_those_who_own_nothing_too(
    said: list[Said],
) -> None:
    # 1 of 1, 2 of 2 and 3 of 3; and 4 of 4.
    norms = {"policy": pytest.approx((1 + 8 + 27) ** 0.5), "draft": 8.0}

    assert [found["norms"] for found in said] == [norms] * RANKS


def test_no_transport_is_imported(said: list[Said]) -> None:
    assert [found["modules"] for found in said] == [[]] * RANKS
