"""Every loss over a vocabulary in shards, by processes of gloo: as one process that has it all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.cases.test_loss_cases import EXTREME, names
from tests.client.losses.extreme_story import extreme
from tests.client.losses.gloo_ranks import Ranks
from tests.client.losses.losses_by_definition import ALL
from tests.client.losses.shard_stories import (
    Case,
    Found,
    alone,
    dense_teacher_told,
    head_alone,
    made,
    sharded,
    sharded_head,
    sum_of,
    told,
    told_of_failure,
    told_of_scales,
    told_of_whole_logits,
)

from teacher_logits.errors import ConfigError
from teacher_logits_client import losses
from teacher_logits_client.losses import Tail, VocabShard
from teacher_logits_client.losses.sharding import checksums

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 4
DENSE = ("dense_soft_cross_entropy", "dense_forward_kl")
EACH = [*ALL, ("logprob_mse", Tail.BUCKET), *((name, Tail.BUCKET) for name in DENSE)]
each_loss = pytest.mark.parametrize(
    ("name", "tail"), EACH, ids=[f"{name}-{tail.value}" for name, tail in EACH]
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(MOST, tmp_path_factory.mktemp("gloo"))
    yield found
    found.close()


def together(case: Case, found: list[Found]) -> torch.Tensor:
    """The gradient of all columns [P,V], in their order."""
    bounds = [case.bounds(rank) for rank in range(case.ranks)]
    parts = [
        torch.tensor(found[rank].gradient, dtype=torch.float64).reshape(case.positions, end - begin)
        for rank, (begin, end) in sorted(enumerate(bounds), key=lambda each: each[1])
    ]
    return torch.cat(parts, 1)


def assert_as_alone(case: Case, found: list[Found], tolerance: float = 1e-12) -> None:
    sums, counts, gradient = alone(case)
    for each in found:
        assert each.sums == found[0].sums
        assert each.sums == pytest.approx(sums.reshape(-1).tolist(), rel=tolerance, abs=tolerance)
        assert each.counts == pytest.approx(counts.reshape(-1).tolist())
        assert each.padding_is_zero
    got = together(case, found)
    assert torch.allclose(got, gradient.double(), rtol=tolerance, atol=tolerance)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Uneven shards in any order of ranks, some empty, with padding or not."""
    name, tail = draw(st.sampled_from(EACH))
    count, columns = draw(st.integers(2, MOST)), draw(st.integers(3, 17))
    inner = sorted(draw(st.lists(st.integers(0, columns), min_size=count - 1, max_size=count - 1)))
    cuts = (0, *inner, columns)
    order = tuple(draw(st.permutations(range(count))))
    padding = tuple(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    # Padded to just the width of the whole vocabulary, a shard is refused.
    assume(
        all(
            cuts[place + 1] - cuts[place] + spare != columns
            for place, spare in zip(order, padding, strict=True)
        )
    )
    return Case(
        name=name,
        tail=tail,
        cuts=cuts,
        order=order,
        padding=padding,
        positions=draw(st.integers(0, 5)),
        k=draw(st.integers(2, columns)),
        spare=draw(st.integers(0, 2)),
        temperature=draw(st.sampled_from([1.0, 0.5, 2.0])),
        scale=draw(st.sampled_from([0.1, 2.0, 30.0])),
        seed=draw(st.integers(0, 2**32)),
        masked=draw(st.booleans()),
        bins=draw(st.sampled_from([None, 1, 3])),
        tile=draw(st.sampled_from([2, 8192])),
    )


class TestAnyShards:
    @settings(max_examples=40)
    @given(case=cases())
    def test_have_the_loss_and_the_gradient_of_one_process(self, ranks: Ranks, case: Case) -> None:
        assert_as_alone(case, ranks.run(case.ranks, sharded, case))


@each_loss
class TestEveryLoss:
    def test_takes_two_reductions_forward_and_none_backward(
        self, ranks: Ranks, name: str, tail: Tail
    ) -> None:
        for found in ranks.run(2, sharded, Case(name=name, tail=tail)):
            assert found.forward == ["c10d.allreduce_"] * 2
            assert found.backward == []

    def test_is_as_alone_where_a_rank_has_no_column_and_one_no_id_of_a_row(
        self, ranks: Ranks, name: str, tail: Tail
    ) -> None:
        case = Case(name=name, tail=tail, cuts=(0, 0, 1, 12), k=3, padding=(2, 0, 2))
        assert not (case.targets().topk_ids == 0).any(1).all()

        assert_as_alone(case, ranks.run(3, sharded, case))

    def test_comes_in_the_type_of_the_logits(self, ranks: Ranks, name: str, tail: Tail) -> None:
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
            case = Case(name=name, tail=tail, dtype=dtype, temperature=2.0)

            assert_as_alone(case, ranks.run(2, sharded, case), tolerance)

    def test_has_a_finite_gradient_where_the_student_rules_ids_out(
        self, ranks: Ranks, name: str, tail: Tail
    ) -> None:
        case = Case(name=name, tail=tail, ruled_out=True, cuts=(0, 2, 4, 12), seed=5)

        found = ranks.run(3, sharded, case)

        assert together(case, found).isfinite().all()
        assert torch.allclose(together(case, found), alone(case)[2], rtol=1e-12, atol=1e-12)

    def test_is_refused_by_every_rank_where_one_has_too_few_columns(
        self, ranks: Ranks, name: str, tail: Tail
    ) -> None:
        case = Case(name=name, tail=tail)

        own, other = ranks.run(2, told, (case, case), (5, 4))

        assert own is not None
        assert other is not None
        assert own[0] == "RequestInvalidError"
        assert own[2] == {"rank": 0, "refused_by": 1}
        assert other[0] == "PayloadInvalidError"
        assert other[2] == {"columns": 4, "shard_columns": 7}


@pytest.mark.parametrize("name", names(EXTREME))
def test_tails_down_to_1e_14_in_fp32_are_as_exact_over_shards(ranks: Ranks, name: str) -> None:
    columns = EXTREME["student_logits"].shape[-1]
    cuts = (0, columns // 5, columns // 2, columns)

    found = ranks.run(3, extreme, name, cuts)

    for each, _ in found:
        assert each == pytest.approx(EXTREME[f"{name}/tok"].flatten().tolist(), rel=1e-5, abs=1e-5)
    gradient = torch.cat([torch.tensor(own) for _, own in found], 1).double()
    wanted = torch.from_numpy(EXTREME[f"{name}/dz"]).reshape(gradient.shape)
    assert torch.allclose(gradient, wanted, rtol=1e-5, atol=1e-5)


class TestHeads:
    @pytest.mark.parametrize(
        ("name", "tail"), ALL, ids=[f"{name}-{tail.value}" for name, tail in ALL]
    )
    def test_whose_rows_are_sharded_are_as_one_head(
        self, ranks: Ranks, name: str, tail: Tail
    ) -> None:
        case = Case(name=name, tail=tail, cuts=(0, 3, 3, 12), padding=(0, 2, 1), temperature=2.0)
        loss, (hidden, weight, bias) = head_alone(case)

        found = ranks.run(3, sharded_head, case)

        for own, (own_hidden, _, _) in found:
            assert own == pytest.approx(loss, rel=1e-12)
            assert own_hidden == pytest.approx(hidden.flatten().tolist(), abs=1e-12)
        weights = [value for _, gradients in found for value in gradients[1]]
        biases = [value for _, gradients in found for value in gradients[2]]
        assert weights == pytest.approx(weight.flatten().tolist(), abs=1e-12)
        assert biases == pytest.approx(bias.tolist(), abs=1e-12)


@pytest.mark.parametrize("name", ["forward_kl", "dense_forward_kl"])
def test_more_positions_than_the_first_reduction_has_room_for_add_up(
    ranks: Ranks, name: str
) -> None:
    case = Case(name=name, positions=66_000, cuts=(0, 2, 4), k=2)
    loss, _ = case.loss(case.student(), case.teacher(), None)

    assert ranks.run(2, sum_of, case) == [pytest.approx(float(loss), rel=1e-9)] * 2


@pytest.mark.parametrize("name", ["forward_kl", "dense_forward_kl"])
@pytest.mark.parametrize("with_head", [False, True])
def test_a_rank_that_fails_over_its_columns_leaves_none_waiting(
    ranks: Ranks, name: str, with_head: bool
) -> None:
    """Such as for want of memory, where a mistake of the caller's was not to be seen."""
    own, other = ranks.run(2, told_of_failure, Case(name=name), with_head and name == "forward_kl")

    assert own == "RequestInvalidError: rank 1 of the vocabulary's shards refused its part"
    assert other == "MemoryError: of rank 1"


class TestRanksThatDisagree:
    """They hear of it in the first reduction, whatever the difference; none is left waiting."""

    @pytest.mark.parametrize(
        "change",
        [
            {"positions": 3},
            {"positions": 300},
            {"positions": 66_000},
            {"seed": 1},
            {"k": 4},
            {"temperature": 2.0},
            {"tail": Tail.TRUNCATED},
            {"dtype": torch.float32},
            {"masked": False},
            {"name": "dense_soft_cross_entropy"},
            {"name": "total_variation"},
            {"first_weight": 1.0},
            {"teacher_lower_by": 0.1},
        ],
        ids=lambda change: "".join(change),
    )
    def test_are_refused_together(self, ranks: Ranks, change: dict[str, object]) -> None:
        case = Case(name="forward_kl", first_weight=0.5)
        other = replace(case, **change)  # type: ignore[arg-type]

        answers = ranks.run(2, told, (case, other), (5, 7))

        assert [each and each[0] for each in answers] == ["RequestInvalidError"] * 2

    @pytest.mark.parametrize(
        "change",
        [
            {"positions": 3},
            {"bins": 2},
            {"temperature": 2.0},
            {"masked": False},
            {"first_weight": 1.0},
            {"bins_lower_by": 1},
            {"name": "dense_soft_cross_entropy"},
        ],
        ids=lambda change: "".join(change),
    )
    def test_about_a_dense_loss_are_refused_together(
        self, ranks: Ranks, change: dict[str, object]
    ) -> None:
        case = Case(name="dense_forward_kl", bins=3, first_weight=0.5)
        other = replace(case, **change)  # type: ignore[arg-type]

        answers = ranks.run(2, told, (case, other), (5, 7))

        assert [each and each[0] for each in answers] == ["RequestInvalidError"] * 2

    @pytest.mark.parametrize(
        ("name", "says"),
        [("jsd 0.5", "jensen_shannon(beta=0.5)"), ("skew_kl", "skew_kl(alpha=0.3)")],
    )
    def test_about_a_share_hear_which_one_is_here(self, ranks: Ranks, name: str, says: str) -> None:
        case = Case(name=name)
        other = replace(case, name="jsd 0.1")

        answers = ranks.run(2, told, (case, other), (5, 7))

        assert [each and each[0] for each in answers] == ["RequestInvalidError"] * 2
        assert answers[0] is not None
        assert says in answers[0][1]

    def test_about_the_scale_of_a_head_are_refused_together(self, ranks: Ranks) -> None:
        case = Case(name="forward_kl")
        assert ranks.run(2, told_of_scales, case, (0.5, 0.5)) == [None, None]

        answers = ranks.run(2, told_of_scales, case, (0.5, 1.0))

        assert [each and each[0] for each in answers] == ["RequestInvalidError"] * 2

    @pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
    def test_hear_all_of_a_dense_teacher_that_one_has_no_distribution_of(
        self, ranks: Ranks, wrong: float
    ) -> None:
        answers = ranks.run(2, dense_teacher_told, Case(name="dense_forward_kl"), wrong)

        facts = {"position": 2, "wrong_positions": 1}
        assert [each and (each[0], each[2]) for each in answers] == [
            ("PayloadInvalidError", facts)
        ] * 2

    def test_can_go_on_afterwards(self, ranks: Ranks) -> None:
        case = Case(name="reverse_kl")
        ranks.run(2, told, (case, replace(case, positions=9)), (5, 7))

        assert_as_alone(case, ranks.run(2, sharded, case))


class TestChecksums:
    """What ranks are held against each other by, beside words."""

    def test_tell_weights_that_are_swapped_far_apart(self) -> None:
        weights = torch.ones(9000, dtype=torch.float64)
        found = set()
        for place in (0, 2048, 4095, 8191):
            other = weights.clone()
            other[place] = 0.5
            found.add(checksums(other))
        assert len(found | {checksums(weights)}) == 5

    @pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64])
    def test_are_of_the_numbers_and_their_order(self, dtype: torch.dtype) -> None:
        one = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)

        assert checksums(one) == checksums(one.T.contiguous().T)
        assert checksums(one) != checksums(one.flip(1)) != checksums(one.flip(0))

    def test_of_nothing_are_there(self) -> None:
        assert checksums(torch.zeros(0), torch.zeros(0, 3)) == "0 0"


class TestShards:
    @pytest.mark.parametrize("with_head", [False, True])
    def test_of_logits_that_are_not_cut_are_refused_by_every_rank(
        self, ranks: Ranks, with_head: bool
    ) -> None:
        answers = ranks.run(2, told_of_whole_logits, Case(name="forward_kl"), with_head)

        for answer, (begin, end) in zip(answers, ((0, 5), (5, 12)), strict=True):
            assert answer is not None
            assert answer[0] == "PayloadInvalidError"
            assert f"give logits[..., {begin}:{end}]" in answer[1]
            wanted = {"columns": 12, "shard_columns": end - begin, "vocabulary_size": 12}
            assert answer[2] == wanted

    def test_of_one_rank_have_the_whole_vocabulary(self, ranks: Ranks) -> None:
        case = Case(name="forward_kl", cuts=(0, 12))

        assert_as_alone(case, ranks.run(1, sharded, case))

    def test_tile_the_vocabulary_in_any_order(self, ranks: Ranks) -> None:
        assert ranks.run(3, made, ((4, 9), (0, 4), (9, 9))) == [9, 9, 9]

    @pytest.mark.parametrize(
        ("bounds", "says"),
        [
            (((0, 4), (5, 9)), "rank 1 has the columns 5 to 9, and the others reach 4"),
            (((0, 4), (3, 9)), "rank 1 has the columns 3 to 9, and the others reach 4"),
            (((1, 4), (4, 9)), "rank 0 has the columns 1 to 4, and the others reach 0"),
            (((0, 4), (0, 4)), "rank 0 has the columns 0 to 4, and the others reach 4"),
            (((0, 0), (0, 0)), "all 2 of them are empty"),
        ],
    )
    def test_that_do_not_tile_it_are_refused_by_every_rank(
        self, ranks: Ranks, bounds: tuple[tuple[int, int], ...], says: str
    ) -> None:
        for answer in ranks.run(2, made, bounds):
            assert isinstance(answer, tuple)
            assert answer[0] == "ConfigError"
            assert says in answer[1]

    @pytest.mark.parametrize("wrong", [(4, 2), (-1, 4), (0.0, 4), ("0", 4)])
    def test_with_bounds_that_are_none_are_refused_by_every_rank(
        self, ranks: Ranks, wrong: tuple[int, int]
    ) -> None:
        own, other = ranks.run(2, made, (wrong, (4, 9)))

        assert isinstance(own, tuple)
        assert isinstance(other, tuple)
        assert f"from {wrong[0]!r} to {wrong[1]!r}" in own[1]
        assert "rank 0 gave no shard" in other[1]

    def test_need_a_process_group(self) -> None:
        with pytest.raises(ConfigError, match="init_process_group"):
            VocabShard(0, 4)

    def test_are_named_where_something_else_is_given(self) -> None:
        case = Case(name="forward_kl")
        with pytest.raises(ConfigError, match="shard is a tuple; give a VocabShard"):
            losses.forward_kl(case.student(), case.targets(), shard=(0, 5))  # type: ignore[arg-type]
